"""What passes between the routes and the gateway where numbers are asked for and no text: vectors and scores. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.generation import TextPrompt, TokenPrompt
from engine.request import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Vectors asked for; what is not told here is as in `deployments.generation.GenerationRequest`.

    Attributes:
        pooling: None for the model's own.
        dimensions: leading numbers of each vector that are kept; None for all.
        normalizes: whether vectors have unit length.
    """

    request_id: str
    model: str
    inputs: tuple[TextPrompt | TokenPrompt, ...]
    pooling: Pooling | None = None
    dimensions: int | None = None
    normalizes: bool = True
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    trace_parent: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of all inputs; token ids count as so many characters as tokens have on average."""
        return sum(len(i.text) if isinstance(i, TextPrompt) else 4 * len(i.token_ids) for i in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """One vector for each input, in order: float32, little-endian."""

    vectors: tuple[bytes, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """Scores asked for; what is not told here is as in `deployments.generation.GenerationRequest`.

    Attributes:
        pairs: (query, document, field of the document in the request).
        truncates_to: tokens that a pair is cut to, -1 for the model's window; None refuses what does not fit.
    """

    request_id: str
    model: str
    pairs: tuple[tuple[str, str, str], ...]
    truncates_to: int | None = None
    tenant: str = ""
    timeout_s: float | None = None
    trace_parent: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of all pairs."""
        return sum(len(query) + len(document) for query, document, _ in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranking:
    """A score from 0 to 1 for each pair, in order."""

    scores: tuple[float, ...]
    num_prompt_tokens: int
