"""One base model as a gateway sees it: its configuration, its tokenizer, and its replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deployments.config import ModelConfig
from deployments.gateway.dialect import Dialect
from deployments.gateway.resumption import TokenSource
from deployments.generation import ChatPrompt, GenerationRequest, TextPrompt
from deployments.generation_calls import GenerationCall, GenerationResult
from deployments.room import Room
from deployments.tokenizer.text_codec import TextCodec
from deployments.waits import patiently
from engine.errors import RequestError

INPUT_PATIENCE_S = 5.0
"""How long a request waits for a tokenizer that is being replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model as a gateway sees it; `encode` may be a call to another process, and `pool` is one.

    Attributes:
        room: places at the tokenizer, for all models together.
    """

    config: ModelConfig
    codec: TextCodec
    dialect: Dialect
    encode: Callable[[ChatPrompt | TextPrompt], Awaitable[Sequence[int]]]
    room: Room
    source: TokenSource
    pool: Callable[[GenerationCall], Awaitable[GenerationResult]]

    async def encode_patiently(self, prompt: ChatPrompt | TextPrompt, flow: Hashable) -> Sequence[int]:
        """Return the token ids of a prompt, if need be from the successor of a tokenizer that has died.

        Args:
            flow: takes turns with other flows if many prompts wait.
        """
        async with self.room.place(flow):
            return await patiently(partial(self.encode, prompt), INPUT_PATIENCE_S)

    def closed(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with sampling parameters that it leaves open set to the model's defaults."""
        defaults: dict[str, Any] = {n: value for n, value in self.config.sampling.items() if n in request.open_params}
        return replace(request, params=replace(request.params, **defaults)) if defaults else request


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Check that all token ids are within a model's vocabulary.

    Raises:
        RequestError: one is not; names the field and the id.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"'{field}' has the token id {wrong}; those of this model are from 0 to {vocab_size - 1}.", field=field
        )
