"""Short prompts are tokenized in the gateway, whatever the tokenizer deployment does; long ones wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from ray.exceptions import ActorDiedError

from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.gateway import prompt_encoder
from deployments.gateway.prompt_encoder import PromptEncoder
from deployments.generation import ChatMessage, ChatPrompt, TextPrompt
from deployments.room import NUM_GUESTS, NUM_PLACES
from deployments.tokenizer import tokenizer
from deployments.tokenizer.text_codec import TextCodec
from deployments.tokenizer.tokenizer import CHARS_PER_TEXT, Tokenizer, build_codecs
from tests.deployments.in_process import Method, Response

LOCAL_CHARS = 1000
SHORT, LONG = TextPrompt(text="Where am I? 日本"), TextPrompt(text="x" * LOCAL_CHARS)
EDGE = TextPrompt(text="x" * (LOCAL_CHARS - 2 * CHARS_PER_TEXT))
MANY = ChatPrompt(messages=(ChatMessage(role="user", content="x"),) * 20)


class Deployment:
    """The tokenizer deployment in this process, which can be gone for some calls."""

    def __init__(self, model: ModelConfig) -> None:
        self._actor = Tokenizer((model,))
        self.asked: list[ChatPrompt | TextPrompt] = []
        self.num_lost = 0
        self.encode = Method(lambda key, prompt: Response(self._encode(key, prompt)))

    async def _encode(self, key: str, prompt: ChatPrompt | TextPrompt) -> bytes | None:
        if self.num_lost:
            self.num_lost -= 1
            raise ActorDiedError
        self.asked.append(prompt)
        return await self._actor.encode(key, prompt)


@pytest.fixture
def codec(tiny_model: ModelConfig) -> TextCodec:
    return build_codecs([tiny_model])["chat"]


@pytest.fixture
def deployment(tiny_model: ModelConfig) -> Deployment:
    return Deployment(tiny_model)


def encoder_of(deployment: Deployment | None, local_chars: int = LOCAL_CHARS) -> PromptEncoder:
    return PromptEncoder(deployment, local_chars)  # type: ignore[arg-type]


def ids_of(codec: TextCodec, prompt: ChatPrompt | TextPrompt) -> Sequence[int]:
    return tuple(codec.encode_chat(prompt) if isinstance(prompt, ChatPrompt) else codec.encode_text(prompt.text))


@pytest.mark.parametrize(
    ("prompt", "local_chars", "is_local"),
    [
        (SHORT, LOCAL_CHARS, True),
        (EDGE, LOCAL_CHARS, True),
        (TextPrompt(text=EDGE.text + "x"), LOCAL_CHARS, False),
        (LONG, LOCAL_CHARS, False),
        (MANY, LOCAL_CHARS, False),
        (SHORT, 0, False),
    ],
)
async def test_the_length_of_a_prompt_decides_where_it_is_tokenized(
    codec: TextCodec, deployment: Deployment, prompt: ChatPrompt | TextPrompt, local_chars: int, is_local: bool
) -> None:
    expected = ids_of(codec, prompt)
    assert await encoder_of(deployment, local_chars).encode(codec, prompt, "flow") == expected
    assert deployment.asked == ([] if is_local else [prompt])
    assert await encoder_of(None, local_chars).encode(codec, prompt, "flow") == expected


async def test_without_the_deployment_only_long_prompts_fail(
    codec: TextCodec, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_encoder, "PATIENCE_S", 0.0)
    encoder = encoder_of(deployment)
    deployment.num_lost = 1
    with pytest.raises(UnavailableError, match="tokenizer"):
        await encoder.encode(codec, LONG, "flow")
    deployment.num_lost = 1
    assert await encoder.encode(codec, SHORT, "flow") == ids_of(codec, SHORT)
    assert deployment.num_lost == 1


async def test_a_long_prompt_waits_for_the_successor_of_a_tokenizer(codec: TextCodec, deployment: Deployment) -> None:
    deployment.num_lost = 2
    assert await encoder_of(deployment).encode(codec, LONG, "flow") == ids_of(codec, LONG)
    assert deployment.asked == [LONG]


async def test_long_prompts_that_fill_the_deployment_delay_no_short_one(
    codec: TextCodec, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had the same places, so short prompts waited for places that only long ones needed."""
    is_over, encode = threading.Event(), tokenizer._encode

    def slowly(codec: TextCodec, prompt: ChatPrompt | TextPrompt) -> list[int]:
        assert prompt is not LONG or is_over.wait(20.0)
        return encode(codec, prompt)

    monkeypatch.setattr(tokenizer, "_encode", slowly)
    encoder = encoder_of(deployment)
    long = [asyncio.create_task(encoder.encode(codec, LONG, "flow")) for _ in range(NUM_PLACES + NUM_GUESTS + 1)]
    while len(deployment.asked) < NUM_PLACES:
        await asyncio.sleep(0)
    assert await encoder.encode(codec, SHORT, "flow") == ids_of(codec, SHORT)
    is_over.set()
    assert await asyncio.gather(*long) == [ids_of(codec, LONG)] * len(long)
