"""The tokenizer deployment and the two ways to use it: in this process, or over a Serve handle.

Token ids cross the handle as little-endian 32-bit integers. Prompts are not batched: encoding one takes less time than
waiting for others would, and the tokenizer library releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate

from ray.serve.handle import DeploymentHandle

from deployments.actor_process import begin_actor, settle
from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.generation import ChatPrompt, TextPrompt
from deployments.generation_calls import pack_ids, unpack_ids
from deployments.handle_calls import until_answered
from deployments.prompt_texts import texts_read
from deployments.tokenizer.text_codec import DEFAULT_MAX_CHARS, TextCodec

MAX_CHARS_PER_TOKEN = 16
"""Bound on a prompt's characters per token of context length, but at least `DEFAULT_MAX_CHARS`; longer is refused."""
NUM_THREADS = 2
LONG_CHARS = 16_384
"""Longer prompts have threads of their own: one of hundreds of kilobytes takes as long as hundreds of others."""
CHARS_PER_TEXT = 32
"""What each text of a prompt counts besides its characters: a message, which has two, takes as long as 64 of them."""
ENCODE_TIMEOUT_S = 10.0
"""More than any prompt takes; a tokenizer that takes longer hangs or is badly overloaded."""


def build_codecs(models: Sequence[ModelConfig]) -> dict[str, TextCodec]:
    """Return the codecs of all models by `ModelConfig.codec_of`; equal folders, bounds and templates share one.

    Raises:
        CheckpointError: a folder has no usable tokenizer, or a chat template cannot be compiled.
    """

    @cache
    def codec(folder: str, max_chars: int, template: str | None) -> TextCodec:
        if template is None:
            return TextCodec(folder, max_chars=max_chars)
        return codec(folder, max_chars, None).with_template(template)

    return {
        name: codec(model.tokenizer_path, max(DEFAULT_MAX_CHARS, MAX_CHARS_PER_TOKEN * model.max_model_len), template)
        for model in models
        for name, template in model.template_by_codec().items()
    }


class LocalTokenizer:
    """Encodes in this process, in threads to keep the event loop free."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._long_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer-long")

    async def encode(self, codec: TextCodec, prompt: ChatPrompt | TextPrompt) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Raises:
            RequestError: as in the `encode` methods of `TextCodec`.
        """
        threads = self._long_threads if is_longer(prompt, LONG_CHARS) else self._threads
        return tuple(await asyncio.get_running_loop().run_in_executor(threads, _encode, codec, prompt))


async def ask_tokenizer(
    handle: DeploymentHandle, local: LocalTokenizer, codec: TextCodec, prompt: ChatPrompt | TextPrompt
) -> tuple[int, ...]:
    """Return the token ids of a prompt from the tokenizer deployment, or from `local` if that lacks the codec.

    While a changed configuration is rolled out, a gateway and a tokenizer may have different versions of it, and an old
    gateway may meet only new tokenizers until its last request has ended.

    Errors of `LocalTokenizer.encode` arrive wrapped by Ray; if the deployment is gone, Ray's own are raised.

    Raises:
        UnavailableError: the deployment does not answer in time.
    """
    try:
        async with asyncio.timeout(ENCODE_TIMEOUT_S):
            packed: bytes | None = await until_answered(handle.encode.remote(codec.key, prompt))
    except TimeoutError as error:
        message = f"The tokenizer has not answered within {ENCODE_TIMEOUT_S:g} seconds."
        raise UnavailableError(message, retry_after_s=ENCODE_TIMEOUT_S) from error
    return await local.encode(codec, prompt) if packed is None else unpack_ids(packed)


class Tokenizer:
    """The actor: a thin wrapper around `LocalTokenizer`."""

    def __init__(self, models: tuple[ModelConfig, ...]) -> None:
        begin_actor()
        self._codec_by_key = {codec.key: codec for codec in build_codecs(models).values()}
        self._local = LocalTokenizer()
        settle()

    async def encode(self, key: str, prompt: ChatPrompt | TextPrompt) -> bytes | None:
        """Return packed token ids; None if there is no codec with this `TextCodec.key`."""
        codec = self._codec_by_key.get(key)
        return None if codec is None else pack_ids(await self._local.encode(codec, prompt))

    async def trouble(self) -> str | None:
        """Return None: a tokenizer that answers is healthy. Gateways call this as a health check."""
        return None


def is_longer(prompt: ChatPrompt | TextPrompt, max_chars: int) -> bool:
    """Return whether a prompt counts more than this many characters (`CHARS_PER_TEXT`)."""
    sizes = (len(text) + CHARS_PER_TEXT for text in texts_read(prompt))
    return any(size > max_chars for size in accumulate(sizes))


def _encode(codec: TextCodec, prompt: ChatPrompt | TextPrompt) -> list[int]:
    if isinstance(prompt, ChatPrompt):
        return codec.encode_chat(prompt)
    if prompt.suffix:
        return codec.encode_between(prompt.text, prompt.suffix)
    return codec.encode_text(prompt.text, has_special_tokens=prompt.has_special_tokens)
