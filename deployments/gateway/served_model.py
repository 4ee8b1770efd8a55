"""One base model as a gateway sees it: its configuration, its tokenizer, and the replicas that answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.config import ModelConfig
from deployments.gateway.dialect import Dialect
from deployments.gateway.resumption import TokenSource
from deployments.generation import ChatPrompt, TextPrompt
from deployments.generation_calls import GenerationCall, GenerationResult
from deployments.stream.detokenizer import Detokenizer
from engine.errors import RequestError


class TextDecoder(Protocol):
    """What an answer asks of the model's tokenizer in this process."""

    def new_detokenizer(self, shown: Mapping[int, str] | None = None) -> Detokenizer:
        """Return the decoder of one answer; `shown` are special tokens that are part of its text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some token ids."""
        ...

    def spelling(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        ...

    def tokens_with(self, text: str) -> tuple[int, ...]:
        """Return the ids of the tokens whose spelling has this text inside; may take as long as a look at all."""
        ...

    def encode_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of a word at the front of a text, and after a space."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model as a gateway sees it; `encode` may be a call to another process, and `pool` is one."""

    config: ModelConfig
    decoder: TextDecoder
    dialect: Dialect
    encode: Callable[[ChatPrompt | TextPrompt], Awaitable[Sequence[int]]]
    source: TokenSource
    pool: Callable[[GenerationCall], Awaitable[GenerationResult]]


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Do nothing where a model has all these token ids, none of them negative.

    Raises:
        RequestError: it has not.
    """
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"'{field}' has the token id {wrong}; those of this model are from 0 to {vocab_size - 1}.", field=field
        )
