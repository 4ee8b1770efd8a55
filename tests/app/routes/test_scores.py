"""Log-probabilities, several answers and echo, as the wire has them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deployments.answer_events import EndReason
from tests.app.routes.test_chat import events
from tests.app.scripted_gateway import ScriptedGateway

USER = {"role": "user", "content": "Hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    question = {"messages": [USER]} if path == CHAT else {"prompt": "Say: "}
    response = await client.post(path, json={"model": "base"} | question | fields)
    assert response.status_code == 200, response.text
    return events(response.text) if fields.get("stream") else response.json()


async def test_a_chat_tells_each_token_with_its_bytes_and_the_likeliest(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["Hel", "lo", " 🙂"]
    assert content[2]["bytes"] == list(" 🙂".encode())
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[0]["logprob"] == -10.0


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_tells_what_the_whole_answer_tells(client: httpx.AsyncClient, path: str) -> None:
    asked = {"logprobs": True} if path == CHAT else {"logprobs": 1, "echo": True}
    whole = (await post(client, path, n=2, **asked))["choices"]
    *chunks, _ = await post(client, path, n=2, stream=True, **asked)
    for index in range(2):
        pieces = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        joined: dict[str, list[Any]] = {}
        for piece in pieces:
            for key, values in piece.items():
                if values is not None:
                    joined.setdefault(key, []).extend(values)
        assert joined == {key: values for key, values in whole[index]["logprobs"].items() if values is not None}


async def test_nobody_who_does_not_ask_is_told(client: httpx.AsyncClient) -> None:
    for path in (CHAT, TEXT):
        assert (await post(client, path))["choices"][0]["logprobs"] is None
        assert all(
            c["logprobs"] is None for chunk in (await post(client, path, stream=True))[:-1] for c in chunk["choices"]
        )


async def test_an_echo_stands_before_the_answer_with_its_tokens(client: httpx.AsyncClient) -> None:
    (choice,) = (await post(client, TEXT, echo=True, logprobs=1))["choices"]
    assert choice["text"] == "Say: Hello 🙂"
    told = choice["logprobs"]
    assert told["tokens"] == ["Say", ": ", "Hel", "lo", " 🙂"]
    assert told["text_offset"] == [0, 3, 5, 8, 10]
    assert told["token_logprobs"] == [None, -10.0, -10.0, -10.0, -10.0]
    assert told["top_logprobs"][0] is None
    assert told["top_logprobs"][1] == {"x0": -0.5, ": ": -10.0}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_answer_at_all_leaves_the_echo(
    client: httpx.AsyncClient, gateway: ScriptedGateway, is_stream: bool
) -> None:
    gateway.pieces, gateway.end = [], EndReason.LENGTH
    options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    answer = await post(client, TEXT, echo=True, max_tokens=0, logprobs=0, **options)
    assert gateway.requests[-1].max_tokens == 0
    if not is_stream:
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Say: ", "length")
        assert choice["logprobs"]["tokens"] == ["Say", ": "]
        assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 7)
        return
    assert "".join(c["text"] for chunk in answer[:-1] for c in chunk["choices"]) == "Say: "
    assert answer[-2]["usage"]["completion_tokens"] == 0


async def test_a_prompt_counts_once_for_all_its_answers(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    answer = await post(client, CHAT, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 9)
    assert len({request.params.seed for request in gateway.requests}) == 3
    *_, last, _ = await post(client, TEXT, prompt=["a", "b"], n=3, stream=True, stream_options={"include_usage": True})
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (14, 18)


async def test_the_best_of_several_are_returned_likeliest_first(client: httpx.AsyncClient) -> None:
    answer = await post(client, TEXT, best_of=4, n=2, logprobs=0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in answer["choices"]] == [-7.0, -8.0]
    assert answer["usage"]["completion_tokens"] == 12
    assert (await post(client, TEXT, best_of=2))["choices"][0]["logprobs"] is None


async def test_never_is_a_number_that_json_has(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.shifts_logprob_by = -float("inf")
    assert (await post(client, CHAT, logprobs=True))["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_the_tier_is_told_to_whoever_names_one(client: httpx.AsyncClient) -> None:
    assert (await post(client, CHAT, service_tier="auto"))["service_tier"] == "default"
    assert (await post(client, CHAT))["service_tier"] is None
    chunks = await post(client, CHAT, service_tier="flex", stream=True)
    assert all(chunk["service_tier"] == "flex" for chunk in chunks[:-1])
    assert all("service_tier" not in chunk for chunk in (await post(client, CHAT, stream=True))[:-1])
