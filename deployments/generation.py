"""What passes between the routes and the gateway: a generation asked for, and the events of its answer.

Pure values; this is text's side of the border, the engine's side is `engine.request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn; `content` is plain text (parts already joined)."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Turns that the model's own chat template renders."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Raw text, tokenised as it stands.

    Attributes:
        has_special_tokens: with the tokenizer's own special tokens around it, as `tokenizer(text)` does.
    """

    text: str
    has_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids chosen by the client; each must be inside the vocabulary."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer follows.

    Attributes:
        source: as llguidance writes grammars.
        field: of the request that asked for it, for messages.
    """

    source: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer asked for.

    Attributes:
        request_id: as sent in `x-request-id`; unique.
        model: public name of a base model or an adapter.
        params: sampling; its `max_tokens` is overwritten by the gateway.
        max_tokens: asked bound, None for the rest of the context.
        stop: stop strings; the text ends before the first of them.
        bad_words: strings that the answer never has, neither at its front nor after a space.
        grammar: what the answer follows, None for anything.
        echoes: whether the prompt's text is told too.
        salt: prefix-cache isolation.
        priority: lower is served first.
        timeout_s: seconds from now after which nobody waits for the answer; None for never.
    """

    request_id: str
    model: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    grammar: Grammar | None = None
    echoes: bool = False
    salt: str = ""
    priority: int = 0
    timeout_s: float | None = None


class TokenScore(NamedTuple):
    """What the model thought of a token, with the token as text.

    Attributes:
        text: its spelling; what is no whole character is U+FFFD.
        raw: its bytes; those of neighbours joined are those of the text.
        logprob: natural logarithm; None for the first token of a prompt, which follows nothing.
        top: the likeliest tokens at its place, likeliest first.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenScore, ...] = ()


class EndReason(StrEnum):
    """OpenAI's `finish_reason` values that a generation can end with."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request is admitted and its first token is there. Errors before it have an HTTP status.

    Attributes:
        prompt_text: the prompt, where it is to be repeated.
        prompt_scores: its tokens, where they are asked for.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_text: str | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of the answer; concatenated pieces are the answer, no character is ever broken.

    Attributes:
        text: empty only where there are scores.
        scores: of the tokens that end in this piece, where they are asked for; all pieces' together are the answer's.
    """

    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event.

    Attributes:
        refusal: the sentence shown where `reason` is CONTENT_FILTER and the input was refused.
    """

    reason: EndReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    refusal: str | None = None


GenerationEvent = Started | TextDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """The token ids of a prompt.

    Attributes:
        max_model_len: context length of the model in tokens.
        texts: what each token stands for; None where nobody asked.
    """

    token_ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What `/v1/models` shows of one servable name.

    Attributes:
        parent: name of the base model where this is an adapter, else None.
        created_s: Unix time at which the name was declared.
        max_model_len: context length in tokens.
    """

    name: str
    parent: str | None
    created_s: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the safety classifier says of one text: probability by hazard, and the hazards over their threshold."""

    score_by_hazard: dict[str, float]
    flagged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Whether every base model has a replica that makes progress.

    Attributes:
        state_by_model: "ready" or one sentence on what is wrong.
    """

    is_ready: bool
    state_by_model: dict[str, str]
