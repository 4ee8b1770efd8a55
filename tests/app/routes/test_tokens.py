from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from app.schemas.tokens import TokenizeResponse
from deployments.generation import ChatMessage, ChatPrompt, TextPrompt, ToolSpec
from tests.app.scripted_gateway import ScriptedGateway

USER = {"role": "user", "content": "Hi"}


async def test_a_text_and_a_chat_become_token_ids(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    answer = (await client.post("/tokenize", json={"model": "base", "prompt": "ab"})).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": None}
    body = {"model": "shout", "messages": [USER], "return_token_strs": True}
    assert (await client.post("/tokenize", json=body)).json()["token_strs"] == ["H", "i"]
    plain = {"model": "base", "prompt": "a", "add_special_tokens": False}
    assert (await client.post("/tokenize", json=plain)).status_code == 200
    assert gateway.tokenized == [
        TextPrompt(text="ab"),
        ChatPrompt(messages=(ChatMessage(role="user", content="Hi"),)),
        TextPrompt(text="a", has_special_tokens=False),
    ]


async def test_a_chat_is_tokenised_with_all_that_its_prompt_depends_on(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body: dict[str, Any] = {
        "model": "base",
        "messages": [USER, {"role": "assistant", "content": "So"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [],
        "reasoning_effort": "low",
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert (await client.post("/tokenize", json=body)).status_code == 200
    (prompt,) = gateway.tokenized
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.tools, prompt.template_options) == ((ToolSpec(name="f"),), {"enable_thinking": False})
    assert (prompt.reasoning_effort, prompt.continues_final_message, prompt.begins_answer) == ("low", True, False)


async def test_the_answer_to_a_large_body_is_made_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def seen(**fields: Any) -> TokenizeResponse:
        threads.append(threading.get_ident())
        return TokenizeResponse(**fields)

    monkeypatch.setattr("app.routes.tokens.TokenizeResponse", seen)
    monkeypatch.setattr("app.http.json_route.MAX_INLINE_BYTES", 0)
    assert (await client.post("/tokenize", json={"model": "base", "prompt": "ab"})).json()["tokens"] == [97, 98]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("wanted", [None, True, False])
async def test_a_prompt_begins_the_answer_unless_it_is_not_wanted(
    client: httpx.AsyncClient, gateway: ScriptedGateway, wanted: bool | None
) -> None:
    body = {"model": "base", "messages": [USER], "add_generation_prompt": wanted}
    assert (await client.post("/tokenize", json=body)).status_code == 200
    (prompt,) = gateway.tokenized
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.begins_answer, prompt.continues_final_message) == (wanted is not False, False)


async def test_token_ids_become_text(client: httpx.AsyncClient) -> None:
    answer = await client.post("/detokenize", json={"model": "base", "tokens": [72, 105]})
    assert answer.json() == {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "base"}, "prompt"),
        ("/tokenize", {"model": "base", "prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"model": "base", "messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"model": "base", "prompt": "a" * 6000}, "prompt"),
        ("/tokenize", {"model": "base", "prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"model": "base", "prompt": "a", "documents": []}, "documents"),
        ("/tokenize", {"model": "base", "messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"model": "base", "messages": [USER] * 9}, "messages"),
        ("/tokenize", {"model": "base", "prompt": 5}, "prompt"),
        ("/detokenize", {"model": "base", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "base", "tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"model": "base"}, "tokens"),
        ("/detokenize", {"model": "base", "tokens": [1] * 5001}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokenize", json={"model": "nobody", "prompt": "a"})).status_code == 404
