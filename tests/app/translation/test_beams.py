from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.app.scripted_gateway import ScriptedGateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True}
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_the_answers_to_one_prompt_share_a_search(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    body = {"model": "base", "prompt": ["a", "b"], "n": 2, "use_beam_search": True, "length_penalty": 0.5}
    answer = (await client.post(TEXT, json=body | {"temperature": 0, "logprobs": 1, "stop_token_ids": [4]})).json()
    assert len(answer["choices"]) == 4
    shares = [request.beams for request in gateway.requests]
    assert all(share is not None and (share.width, share.length_penalty) == (2, 0.5) for share in shares)
    assert [share.place for share in shares if share] == [0, 1, 0, 1]
    first, second, third, fourth = [share.group for share in shares if share]
    assert first == second != third == fourth


async def test_a_chat_has_as_many_beams_as_answers(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    assert (await client.post(CHAT, json=GOOD | {"n": 3})).status_code == 200
    assert {request.beams.width for request in gateway.requests if request.beams} == {3}
    assert len(gateway.requests) == 3


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 17}, "n"),
        ({"stop": "x"}, "stop"),
        ({"tools": [TOOL]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"dry_multiplier": 1}, "dry_multiplier"),
        ({"lz_penalty": 1}, "lz_penalty"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
async def test_what_cannot_be_searched_for_is_refused_by_name(
    client: httpx.AsyncClient, gateway: ScriptedGateway, change: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=GOOD | change)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not gateway.requests


@pytest.mark.parametrize(("change", "param"), [({"best_of": 2}, "best_of"), ({"echo": True}, "echo")])
async def test_what_only_texts_have_is_refused_too(
    client: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    body = {"model": "base", "prompt": "a", "use_beam_search": True} | change
    response = await client.post(TEXT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
