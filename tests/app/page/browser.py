"""The page in a real browser, against an API that a test writes, driven by a script that a test adds to the page."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from app.routes import page
from tests.app.serving import serving

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 30.0
"""For the browser to start and run a script on a busy machine."""

PRELUDE = """
const $ = (id) => document.getElementById(id);
const until = async (is) => { while (!is()) await new Promise((go) => setTimeout(go, 10)); };
const send = async (text) => {
  await until(() => models().length);
  $("message").value = text;
  $("ask").requestSubmit();
};
const answered = () => until(() => !$("send").disabled);
const turns = () => [...document.querySelectorAll(".turn")].map((turn) => turn.textContent);
const figures = () => $("live").textContent;
const models = () => [...$("model").options].map((option) => option.text);
const go = () => fetch("go", { method: "POST" });
const report = (told) => fetch("outcome", { method: "POST", body: JSON.stringify(told) });
"""


def delta(text: str) -> str:
    """An event of a stream that brings text."""
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


GATE = "gate"
"""A place in a stream that is passed once the script has called `go`."""
DONE = "data: [DONE]\n\n"
MODELS = JSONResponse({"data": [{"id": "base", "task": "generate"}, {"id": "ranks", "task": "score"}]})
TIMELINE = {
    "model": "base",
    "prompt_tokens": 5,
    "cached_tokens": 0,
    "completion_tokens": 2,
    "ttft_ms": 1.0,
    "tpot_ms": 1.0,
    "total_ms": 3.0,
    "outcome": "stop",
    "num_attempts": 1,
    "stages": [{"name": "prefill of 5 tokens", "start_ms": 0.0, "end_ms": 1.0}],
    "arrivals": [[1.0, 1], [2.0, 1]],
}


@dataclass
class Api:
    """What the page is answered.

    Attributes:
        chats: one response for each chat request, or the events of a stream.
        metrics, models: one response for each time that the page asks; the last is repeated.
        has_no_timelines: whether requests for them are never answered.
        asked: bodies of the chat requests.
    """

    chats: Sequence[Response | list[str]] = ()
    metrics: Sequence[Response] = (Response(""),)
    models: Sequence[Response] = (MODELS,)
    has_no_timelines: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    outcome: Any = None


def run(api: Api, script: str, folder: Path, *options: str) -> Any:
    """Open the page in a browser, run a script in it, and return what it reports."""
    assert PROGRAM is not None
    has_told = threading.Event()
    with serving(_application(api, script, has_told)) as url:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", *options]
        browser = subprocess.Popen([PROGRAM, *flags, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert has_told.wait(PATIENCE_S), "the script has reported nothing"
        finally:
            browser.kill()
            browser.wait()
    return api.outcome


def _application(api: Api, script: str, has_told: threading.Event) -> FastAPI:
    app = FastAPI()
    may_go = asyncio.Event()
    chats, metrics, models = iter(api.chats), list(api.metrics), list(api.models)

    @app.get("/")
    async def index() -> Response:
        own = await page.page()
        tag = b'<script type="module" src="script.js"></script></head>'
        return Response(bytes(own.body).replace(b"</head>", tag), media_type="text/html")

    @app.get("/script.js")
    async def script_file() -> Response:
        return Response(PRELUDE + script, media_type="text/javascript")

    @app.post("/outcome")
    async def outcome(request: Request) -> None:
        api.outcome = await request.json()
        has_told.set()

    @app.post("/go")
    async def go() -> None:
        may_go.set()

    @app.get("/v1/models")
    async def list_models() -> Response:
        return models.pop(0) if len(models) > 1 else models[0]

    @app.get("/metrics")
    async def scrape() -> Response:
        return metrics.pop(0) if len(metrics) > 1 else metrics[0]

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        api.asked.append(await request.json())
        answer = next(chats)
        if isinstance(answer, Response):
            return answer
        headers = {"x-request-id": f"r{len(api.asked)}"}
        return StreamingResponse(_events(answer, may_go), media_type="text/event-stream", headers=headers)

    @app.get("/requests/{request_id}")
    async def timeline(request_id: str) -> Response:
        if api.has_no_timelines:
            await asyncio.Event().wait()
        return JSONResponse({"answers": [TIMELINE | {"id": request_id}]})

    app.include_router(page.router)
    return app


async def _events(events: list[str], may_go: asyncio.Event) -> AsyncIterator[str]:
    for event in events:
        if event == GATE:
            await may_go.wait()
        else:
            yield event
