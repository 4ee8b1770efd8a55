"""One tokenizer for each folder, whoever shares it; ids cross the handle packed and arrive as they were."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.generation import ChatMessage, ChatPrompt, TextPrompt, ToolCall, ToolSpec
from deployments.generation_calls import unpack_ids
from deployments.tokenizer import tokenizer
from deployments.tokenizer.text_codec import TextCodec
from deployments.tokenizer.tokenizer import (
    LONG_CHARS,
    NUM_THREADS,
    LocalTokenizer,
    Tokenizer,
    ask_tokenizer,
    build_codecs,
)
from tests.deployments.in_process import Method, Response

PATIENCE_S = 20.0
CHAT = ChatPrompt(messages=(ChatMessage(role="user", content="Where am I? 日本"),))


def test_models_that_share_a_folder_share_a_codec(tiny_model: ModelConfig) -> None:
    long = replace(tiny_model, name="long", max_model_len=1_000_000)
    codecs = build_codecs([tiny_model, replace(tiny_model, name="twin"), long])
    assert codecs["chat"] is codecs["twin"]
    assert codecs["long"] is not codecs["chat"]


def test_adapters_with_other_templates_have_codecs_and_share_those_of_one_text(tiny_model: ModelConfig) -> None:
    said, other = "{{ messages[0].content }}", "{{ messages[0].role }}"
    templates = {"a": other, "b*": other, "*": said}
    model = replace(tiny_model, name="said", chat_template=said, template_by_pattern=templates)
    codecs = build_codecs([tiny_model, model])
    a, b, c, base = (codecs[model.codec_of(name)] for name in ("a", "b1", "c", None))
    assert a is b
    assert c is base
    assert codecs["chat"].pieces is a.pieces
    texts = [codec.pieces.decode(codec.encode_chat(CHAT)) for codec in (a, base)]
    assert texts == ["user", CHAT.messages[0].content]
    assert codecs[tiny_model.codec_of("a")] is codecs["chat"]


class Handle:
    """A Serve handle to an actor in this process."""

    def __init__(self, actor: Tokenizer) -> None:
        self._actor = actor
        self.encode = self

    async def remote(self, key: str, prompt: ChatPrompt | TextPrompt) -> bytes | None:
        return await self._actor.encode(key, prompt)


@pytest.fixture
def codec(tiny_model: ModelConfig) -> TextCodec:
    return build_codecs([tiny_model])["chat"]


async def test_here_or_in_an_actor_a_prompt_becomes_the_same_tokens(tiny_model: ModelConfig, codec: TextCodec) -> None:
    handle, local = Handle(Tokenizer((tiny_model,))), LocalTokenizer()
    for prompt in (CHAT, TextPrompt(text="raw text")):
        token_ids = await local.encode(codec, prompt)
        assert token_ids
        assert unpack_ids(await handle.remote(codec.key, prompt) or b"") == token_ids
        assert await ask_tokenizer(handle, local, codec, prompt) == token_ids  # type: ignore[arg-type]


async def test_an_actor_of_another_configuration_is_not_used(tiny_model: ModelConfig, codec: TextCodec) -> None:
    """A gateway that waited for its successor's tokenizer answered 503: none of its own version was left."""
    handle = Handle(Tokenizer((replace(tiny_model, chat_template="{{ messages[0].role }}"),)))
    token_ids = await ask_tokenizer(handle, LocalTokenizer(), codec, CHAT)  # type: ignore[arg-type]
    assert token_ids == tuple(codec.encode_chat(CHAT))


async def test_while_a_prompt_is_encoded_the_event_loop_goes_on(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_goes_on, local = threading.Event(), LocalTokenizer()
    monkeypatch.setattr(tokenizer, "_encode", lambda codec, prompt: (int(loop_goes_on.wait(PATIENCE_S)),))
    encoding = asyncio.create_task(local.encode(codec, CHAT))
    asyncio.get_running_loop().call_later(0.01, loop_goes_on.set)
    assert await encoding == (1,)


LONG = "x" * LONG_CHARS
CALL = ToolCall(call_id="1", name="get", arguments=LONG)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(text=LONG + "y"),
        ChatPrompt(messages=(ChatMessage(role="user", content=LONG), ChatMessage(role="user", content="y"))),
        ChatPrompt(messages=(ChatMessage(role="assistant", content="y", tool_calls=(CALL,)),)),
        ChatPrompt(messages=CHAT.messages, tools=(ToolSpec(name="get", parameters={"properties": {"a": LONG}}),)),
        ChatPrompt(messages=CHAT.messages, template_options={"a": [LONG]}),
    ],
)
async def test_a_short_prompt_does_not_wait_for_long_ones(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, prompt: ChatPrompt | TextPrompt
) -> None:
    """Twenty requests with 120 tools each held up everybody for four seconds."""
    has_short, local = threading.Event(), LocalTokenizer()
    monkeypatch.setattr(
        tokenizer, "_encode", lambda codec, asked: (int(has_short.wait(PATIENCE_S)) if asked is prompt else 2,)
    )
    long = [asyncio.create_task(local.encode(codec, prompt)) for _ in range(NUM_THREADS)]
    await asyncio.sleep(0)
    assert await local.encode(codec, CHAT) == (2,)
    has_short.set()
    assert await asyncio.gather(*long) == [(1,)] * NUM_THREADS


async def test_an_actor_that_hangs_is_unavailable(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Response(asyncio.Future())

    class Hung:
        encode = Method(lambda *args: asked)

    monkeypatch.setattr(tokenizer, "ENCODE_TIMEOUT_S", 0.01)
    with pytest.raises(UnavailableError, match="not answered"):
        await ask_tokenizer(Hung(), LocalTokenizer(), codec, CHAT)  # type: ignore[arg-type]
    # One that is only slow must not encode what nobody waits for any more.
    assert asked.task.cancelled()
