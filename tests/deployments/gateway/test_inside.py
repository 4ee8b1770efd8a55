from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from deployments.batches.values import InsideAnswer, InsideCall
from deployments.gateway import inside
from deployments.gateway.inside import INSIDE, MAX_ANSWER_BYTES, answer_inside, beating

CALL = InsideCall(tenant="blue", method="POST", path="/v1/x y?\n%41", request_id="r1", body=b"[1]", timeout_s=2.5)


async def test_the_application_sees_a_request_and_for_whom_it_is() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        told = {
            "body": await request.json(),
            "tenant": scope["state"][INSIDE],
            "path": scope["path"],
            "id": request.headers["x-request-id"],
            "timeout": request.headers["x-request-timeout"],
        }
        await JSONResponse(told, status_code=503, headers={"retry-after": "7"})(scope, receive, send)

    answer = await answer_inside(app, CALL)
    assert answer == InsideAnswer(
        status=503,
        body=b'{"body":[1],"tenant":"blue","path":"/v1/x y?\\n%41","id":"r1","timeout":"2.500"}',
        retry_after_s=7.0,
    )


@pytest.mark.parametrize("name", ["..", "../../version", "a/../b", "a/.", ".hidden/x", "%2e%2e/version", "//host/x"])
async def test_a_name_in_a_path_leads_to_no_other_route(name: str) -> None:
    """A batch of the model `../../version` passed its validation, as that route had answered."""
    paths = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await JSONResponse(0)(scope, receive, send)

    await answer_inside(app, replace(CALL, path=f"/v1/models/{name}"))
    assert paths == [f"/v1/models/{name}"]


@pytest.mark.parametrize(("told", "retry_after_s"), [("7", 7.0), ("soon", None), ("²", None), (None, None)])
async def test_only_seconds_tell_when_to_come_back(told: str | None, retry_after_s: float | None) -> None:
    timeouts: list[str | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        timeouts.append(Request(scope).headers.get("x-request-timeout"))
        await JSONResponse(0, status_code=503, headers={"retry-after": told} if told else {})(scope, receive, send)

    assert (await answer_inside(app, replace(CALL, timeout_s=None))).retry_after_s == retry_after_s
    assert timeouts == [None]


@pytest.mark.parametrize("told", ["false", "true", None])
async def test_whether_a_failure_would_recur_is_told(told: str | None) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(0, status_code=500, headers={"x-should-retry": told} if told else {})(scope, receive, send)

    assert (await answer_inside(app, CALL)).is_final == (told == "false")


async def test_an_answer_that_cannot_be_carried_is_told() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse("x" * MAX_ANSWER_BYTES)(scope, receive, send)

    answer = await answer_inside(app, CALL)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "answer_too_large")


async def test_signs_of_life_come_before_an_answer_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "BEAT_S", 0.001)
    is_ready = asyncio.Event()

    async def work() -> str:
        await is_ready.wait()
        return "answer"

    signs = beating(work())
    assert [await anext(signs), await anext(signs)] == [None, None]
    is_ready.set()
    assert [sign async for sign in signs if sign is not None] == ["answer"]


async def test_an_answer_that_nobody_waits_for_any_more_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "BEAT_S", 0.001)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    signs = beating(work())
    assert [await anext(signs) for _ in range(2)] == [None, None]
    await signs.aclose()
    assert ended.is_set()
    at_once = beating(work())
    assert await anext(at_once) is None
    await at_once.aclose()


async def test_it_never_leaves_and_its_end_is_the_application_s() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(answer_inside(app, CALL), 0.05)
    assert ended.is_set()
