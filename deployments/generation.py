"""What passes between the routes and the gateway: a generation asked for, and the events of its answer.

Pure values; this is text's side of the border, the engine's side is `engine.request`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from engine.request import SamplingParams

READY = "ready"
PREDICTION_FIELD = "prediction.content"
"""What a client calls `GenerationRequest.prediction`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model has made in an earlier turn; `arguments` is JSON text, which may be truncated."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn; `content` is plain text (parts already joined).

    Attributes:
        tool_calls: of an assistant's turn.
        tool_call_id: of a tool's turn: the call that it answers.
        reasoning: of an assistant's turn: its thoughts, which most templates leave out.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of an object, its arguments.
        is_strict: refuse a schema that cannot be followed, rather than let any object pass.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How an answer may call tools.

    Attributes:
        tools: all that the model is told of.
        callable_names: those that it may call; none forbids calls.
        is_required: the answer is one or more calls.
        is_parallel: more than one call may come.
    """

    tools: tuple[ToolSpec, ...]
    callable_names: frozenset[str]
    is_required: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Turns that the model's own chat template renders.

    Attributes:
        tools: what the template tells the model of.
        template_options: variables of the template that a client has set.
        reasoning_effort: "none" for no thoughts, or how long they may be; None for the template's own.
        effort_is_hint: a template that knows no effort goes without; else that is an error.
        continues_final_message: the answer goes on with the last turn, an assistant's, instead of a new one.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)
    continues_final_message: bool = False
    reasoning_effort: str | None = None
    effort_is_hint: bool = False


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
class BeamShare:
    """That an answer is one of those that a beam search finds.

    Attributes:
        group: the answers of one search have the same, and no others.
        width: sequences that are followed, and found.
        place: which of those found the answer is, the best being 0.
        length_penalty: see `deployments.gateway.beam_search.BeamSearch`.
    """

    group: str
    width: int
    place: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moderation:
    """That an answer tells what the safety classifier finds.

    Attributes:
        tells_input: of the input too; of several answers to one prompt the first does.
        blocks_input, blocks_output: what is flagged is not let through, even where the server's own policy would.
    """

    tells_input: bool = True
    blocks_input: bool = False
    blocks_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer asked for.

    Attributes:
        request_id: as sent in `x-request-id`; unique.
        model: public name of a base model or an adapter.
        params: sampling; its `max_tokens` is overwritten by the gateway.
        open_params: names of those that nobody has asked for, which are then as the model's makers say.
        max_tokens: asked bound, None for the rest of the context.
        max_tokens_field: what the client calls it.
        clips_max_tokens: where the context has less room it is that; else such a request is refused.
        stop: stop strings; the text ends before the first of them.
        bad_words: strings that the answer never has, neither at its front nor after a space.
        dry_breakers: strings over which no repeat reaches, where `params` ask for DRY; its token ids come of them.
        grammar: what the answer follows, apart from its thoughts and calls; None for anything.
        tool_use: how it may call tools, None where there are none.
        echoes: whether the prompt's text is told too.
        beams: the search that the answer comes from; None where its tokens are drawn one by one.
        moderation: None where nobody wants to know what the classifier finds.
        prediction: what the answer is expected to be, but for some places; it changes nothing but how soon it comes.
        tenant: whose share of the engine it takes; empty for that of the salt.
        salt: prefix-cache isolation.
        retention_s: as in `engine.request.Request`.
        priority: lower is served first.
        timeout_s: seconds from now after which nobody waits for the answer; None for never.
        trace_parent: what the client sent as `traceparent`.
    """

    request_id: str
    model: str
    prompt: Prompt
    params: SamplingParams
    open_params: frozenset[str] = frozenset()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    clips_max_tokens: bool = False
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] = ()
    grammar: Grammar | None = None
    tool_use: ToolUse | None = None
    echoes: bool = False
    beams: BeamShare | None = None
    moderation: Moderation | None = None
    prediction: str = ""
    tenant: str = ""
    salt: str = ""
    retention_s: float = 0.0
    priority: int = 0
    timeout_s: float | None = None
    trace_parent: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of the prompt; token ids count as so many characters as tokens have on average."""
        match self.prompt:
            case TextPrompt():
                return len(self.prompt.text)
            case TokenPrompt():
                return 4 * len(self.prompt.token_ids)
        return sum(len(message.content) for message in self.prompt.messages)


class TokenScore(NamedTuple):
    """What the model thought of a token, with the token as text.

    Attributes:
        text: its spelling; what is no whole character is U+FFFD.
        raw: its bytes, none where the text does not show it; those of neighbours joined are those of the text.
        logprob: natural logarithm; None for the first token of a prompt, which follows nothing.
        top: the likeliest tokens at its place, likeliest first.
        rank: of the token among all at its place, 1 for the likeliest.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenScore, ...] = ()
    rank: int = 1


class EndReason(StrEnum):
    """OpenAI's `finish_reason` values that a generation can end with."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request is admitted and its first token is there. Errors before it have an HTTP status.

    Attributes:
        fingerprint: of the weights, the adapter and the engine's configuration; equal ones draw equal answers.
        prompt_text: the prompt, where it is to be repeated.
        prompt_scores: its tokens, where they are asked for.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    fingerprint: str = ""
    prompt_text: str | None = None
    prompt_scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a call; the first of each has its id and name, and the concatenated arguments are JSON text.

    Attributes:
        index: place of the call among those of the answer.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of the answer; concatenated pieces are the answer, no character is ever broken.

    Attributes:
        text: of the content.
        reasoning: of the thoughts before it.
        calls: of the calls behind it.
        scores: of the tokens that end in this piece, where they are asked for; all pieces' together are the answer's.
        num_tokens: of the answer so far.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the safety classifier says of one text: probability by hazard, and the hazards over their threshold.

    Attributes:
        error: why the text passes unjudged, where it does.
    """

    score_by_hazard: dict[str, float]
    flagged: tuple[str, ...]
    error: str | None = None


class Moderated(NamedTuple):
    """What the safety classifier found in the input and in the output of an answer; None of what had no text."""

    input: Verdict | None
    output: Verdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event.

    Attributes:
        num_reasoning_tokens: of `num_completion_tokens`, those of the thoughts.
        num_accepted, num_rejected: tokens of the prediction that the answer took, and that were computed in vain.
        stop: the stop string that ended the text, where one has.
        refusal: the sentence shown where `reason` is CONTENT_FILTER and the input was refused.
        moderation: where it was asked for.
    """

    reason: EndReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    stop: str | None = None
    refusal: str | None = None
    moderation: Moderated | None = None


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
        task: "generate", "embed" of a model that makes vectors only, or "score" of a cross-encoder.
        created_s: Unix time at which the name was declared.
        max_model_len: context length in tokens.
    """

    name: str
    parent: str | None
    created_s: int
    max_model_len: int
    task: str = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """Whether everything that an answer needs has a replica that makes progress.

    Attributes:
        state_by_model: "ready" or one sentence on what is wrong.
        state_by_part: likewise, of what else is a deployment of its own: tokenizer, safety classifier, cross-encoders.
    """

    state_by_model: dict[str, str]
    state_by_part: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return all(state == READY for state in (*self.state_by_model.values(), *self.state_by_part.values()))
