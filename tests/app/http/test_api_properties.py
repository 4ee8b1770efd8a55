"""Random JSON in every field, through the whole application: never a 5xx, always a body that parses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.api import create_app
from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.schemas.moderations import ModerationRequest
from app.settings import LimitSettings
from tests.app.scripted_gateway import ScriptedGateway
from tests.contract.published import check_answer

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "base", "text", "assistant", "system", 0, 1, -1, 2**31, 2**63])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x", "include_usage"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def _bodies(good: dict[str, Any], fields: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(fields) | st.text(max_size=6)
    return st.dictionaries(names, VALUES, max_size=4).map(lambda change: good | change)


BODIES = st.one_of(
    _bodies(
        {"model": "base", "messages": [{"role": "user", "content": "Hi"}]},
        [*ChatCompletionRequest.model_fields, *ChatCompletionRequest.NEUTRAL],
    ).map(lambda body: ("/v1/chat/completions", body)),
    _bodies(
        {"model": "base", "prompt": "Hi"}, [*CompletionRequest.model_fields, *CompletionRequest.NEUTRAL]
    ).map(lambda body: ("/v1/completions", body)),
    _bodies({"input": "Hi"}, [*ModerationRequest.model_fields]).map(lambda body: ("/v1/moderations", body)),
)  # fmt: skip


async def _post(path: str, content: bytes) -> httpx.Response:
    app = create_app(ScriptedGateway(), limits=LimitSettings(max_body_bytes=4096), moderation_model="guard")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        return await client.post(path, content=content, headers={"content-type": "application/json"})


def _check(response: httpx.Response) -> None:
    assert response.status_code < 500
    check_answer(response)


@settings(max_examples=200, deadline=None)
@given(BODIES)
def test_no_body_makes_a_server_error(path_and_body: tuple[str, dict[str, Any]]) -> None:
    path, body = path_and_body
    _check(asyncio.run(_post(path, json.dumps(body, allow_nan=True).encode())))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64))
def test_no_bytes_make_a_server_error(content: bytes) -> None:
    _check(asyncio.run(_post("/v1/chat/completions", content)))
