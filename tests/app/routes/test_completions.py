from __future__ import annotations

import httpx
import pytest

from app.schemas.completions import Completion
from deployments.generation import TextPrompt, TokenPrompt
from engine.errors import EngineError
from tests.app.routes.test_chat import events
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/completions"


async def test_an_answer_has_every_field_of_the_contract(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    answer = (await client.post(PATH, json={"model": "base", "prompt": "Hi"})).json()
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello 🙂", "logprobs": None, "finish_reason": "stop"}]
    assert gateway.requests[0].max_tokens == 16
    assert (await client.post(PATH, json={"model": "base", "prompt": "Hi", "max_tokens": None})).status_code == 200
    assert (gateway.requests[1].max_tokens, gateway.requests[1].clips_max_tokens) == (16, True)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a"], [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokenPrompt(token_ids=(1, 2))]),
        ([[1], [2, 3]], [TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3))]),
    ],
)
async def test_each_prompt_is_one_choice_in_order(
    client: httpx.AsyncClient, gateway: ScriptedGateway, prompt: object, expected: list[object]
) -> None:
    answer = (await client.post(PATH, json={"model": "base", "prompt": prompt})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert [request.prompt for request in gateway.requests] == expected
    assert len({request.request_id for request in gateway.requests}) == len(expected)
    assert answer["usage"]["total_tokens"] == 10 * len(expected)


async def test_choices_of_a_stream_interleave_and_each_ends_once(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events((await client.post(PATH, json=body)).text)
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == "Hello 🙂"
        assert [choice["finish_reason"] for choice in own] == [None, None, None, "stop"]


@pytest.mark.parametrize(("stop", "stop_id", "told"), [("\n", None, "\n"), (None, 7, 7), (None, None, None)])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_an_answer_tells_which_stop_of_the_request_ended_it(
    client: httpx.AsyncClient,
    gateway: ScriptedGateway,
    path: str,
    stop: str | None,
    stop_id: int | None,
    told: str | int | None,
) -> None:
    gateway.stop, gateway.stop_id = stop, stop_id
    body = {"model": "base"} | ({"prompt": "Hi"} if path == PATH else {"messages": [{"role": "user", "content": "Hi"}]})
    (whole,) = (await client.post(path, json=body)).json()["choices"]
    *_, last, _ = events((await client.post(path, json=body | {"stream": True})).text)
    expected = {"finish_reason": "stop"} | ({} if told is None else {"stop_reason": told})
    for choice in (whole, *last["choices"]):
        assert {key: value for key, value in choice.items() if key.endswith("_reason")} == expected


async def test_a_text_may_do_without_the_token_that_begins_others(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = {"model": "base", "prompt": ["a", "b"]}
    for wanted in (None, True, False):
        assert (await client.post(PATH, json=body | {"add_special_tokens": wanted})).status_code == 200
    given = [prompt.has_special_tokens for r in gateway.requests if isinstance(prompt := r.prompt, TextPrompt)]
    assert given == [True, True, True, True, False, False]


async def test_one_failed_choice_ends_all(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.error_after = EngineError("dead")
    response = await client.post(PATH, json={"model": "base", "prompt": ["a", "b"]})
    assert response.status_code == 500
    assert gateway.num_open == 0


PROMPT_LOGPROBS = [
    None,
    {
        "2": {"logprob": -10.0, "rank": 9, "decoded_token": ": "},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "x0"},
    },
]


async def test_a_prompt_s_scores_stand_beside_the_text(client: httpx.AsyncClient) -> None:
    asked = {"model": "base", "prompt": "Hi", "prompt_logprobs": 1, "logprobs": 0}
    (choice,) = (await client.post(PATH, json=asked)).json()["choices"]
    assert choice["prompt_logprobs"] == PROMPT_LOGPROBS
    assert choice["logprobs"]["tokens"] == ["Hel", "lo", " 🙂"]
    chunks = events((await client.post(PATH, json=asked | {"stream": True})).text)
    first, *others = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert (first["text"], first["prompt_logprobs"], first["logprobs"]["tokens"]) == ("", PROMPT_LOGPROBS, [])
    assert all("prompt_logprobs" not in choice for choice in others)
    assert others[0]["logprobs"]["text_offset"] == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_and_the_prompt_s_scores_have_each_as_many_as_was_asked(
    client: httpx.AsyncClient, gateway: ScriptedGateway, stream: bool
) -> None:
    asked = {"model": "base", "prompt": "Hi", "prompt_logprobs": 1, "logprobs": 2, "echo": True, "stream": stream}
    response = await client.post(PATH, json=asked)
    assert gateway.requests[0].params.num_prompt_logprobs == 2
    choice = (events(response.text)[0] if stream else response.json())["choices"][0]
    assert choice["prompt_logprobs"] == PROMPT_LOGPROBS
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"x0": -0.5, "x1": -1.5, ": ": -10.0}]


async def test_token_ids_are_returned_if_asked_for(client: httpx.AsyncClient) -> None:
    """In the places where vLLM has them, which are not those of a chat."""
    asked = {"model": "base", "prompt": "Hi", "return_token_ids": True}
    (choice,) = (await client.post(PATH, json=asked)).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2], [3, 2, 2])
    streamed = events((await client.post(PATH, json=asked | {"stream": True})).text)[:-1]
    first, *others = (chunk["choices"][0] for chunk in streamed if chunk["choices"])
    assert (first["prompt_token_ids"], first["text"]) == ([1, 2], "")
    assert [choice["token_ids"] for choice in others if "token_ids" in choice] == [[3], [2], [2]]
