"""Values passed between the routes and the gateway for requests without text output. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deployments.generation import ClientRequest, TextPrompt, TokenPrompt
from deployments.prompt_texts import num_chars
from engine.request import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(ClientRequest):
    """A request for vectors: embeddings, or scores of an adapter's classifier.

    Attributes:
        pooling: None for the model's default.
        dimensions: how many leading numbers of each vector to keep; None for all.
        normalizes: whether to scale vectors to unit length.
    """

    inputs: tuple[TextPrompt | TokenPrompt, ...]
    pooling: Pooling | None = None
    dimensions: int | None = None
    normalizes: bool = True

    @property
    def num_chars(self) -> int:
        """Characters of all inputs."""
        return sum(map(num_chars, self.inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """One vector for each input, in order: float32, little-endian."""

    vectors: tuple[bytes, ...]
    num_prompt_tokens: int


class Pair(NamedTuple):
    """A query and a document.

    Attributes:
        field: the request field of the document, for messages.
        max_tokens: truncate both to so many tokens together, longest first; None refuses pairs that do not fit.
    """

    query: str
    document: str
    field: str
    max_tokens: int | None = None

    @property
    def num_chars(self) -> int:
        """Characters of both."""
        return len(self.query) + len(self.document)


class PairScore(NamedTuple):
    """How well a document answers a query, from 0 to 1, and the number of tokens read for it."""

    score: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(ClientRequest):
    """A request for scores.

    Attributes:
        truncates_to: tokens that a pair is truncated to, -1 for the model's window; None refuses pairs that do not fit.
    """

    pairs: tuple[Pair, ...]
    truncates_to: int | None = None

    @property
    def num_chars(self) -> int:
        """Characters of all pairs."""
        return sum(pair.num_chars for pair in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranking:
    """A score from 0 to 1 for each pair, in order."""

    scores: tuple[float, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """The token ids of a prompt.

    Attributes:
        max_model_len: context length of the model in tokens.
        texts: the text of each token; None if not requested.
    """

    token_ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None
