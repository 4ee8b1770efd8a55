"""Values passed from the routes to the gateway: generation requests; and what the gateway tells of its models.

Pure. These are the text-level types; the engine's token-level types are in `engine.request`, and the events of answers
in `deployments.answer_events`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from deployments.siblings import Siblings
from deployments.timeline import Reception
from engine.request import SamplingParams

READY = "ready"
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""What clients may ask for, from least to most."""
# Names of fields in requests, the second of which is a template option.
PREDICTION_FIELD, DOCUMENTS = "prediction.content", "documents"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of an earlier turn, or of an answer; `arguments` is JSON text, which may be truncated."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn; `content` is plain text (parts already joined).

    Attributes:
        tool_calls: of an assistant turn.
        tool_call_id: of a tool turn: the call that it answers.
        reasoning: of an assistant turn: its reasoning, which most templates leave out.
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
        parameters: JSON schema of the arguments object.
        is_strict: refuse a schema that cannot be enforced, instead of accepting any object.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How an answer may call tools.

    Attributes:
        tools: all tools that the prompt shows to the model.
        callable_names: those that it may call; empty forbids calls.
        is_required: the answer must be one or more calls.
        is_parallel: more than one call is allowed.
    """

    tools: tuple[ToolSpec, ...]
    callable_names: frozenset[str]
    is_required: bool = False
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Turns that the model's own chat template renders.

    Attributes:
        tools: tools that the template shows to the model.
        template_options: template variables set by the client.
        reasoning_effort: "none" for no reasoning, or how much; None for the template's default.
        effort_is_hint: ignore the effort if the template does not support it; otherwise that is an error.
        continues_final_message: the answer continues the last turn, an assistant's, instead of starting a new one.
        begins_answer: the template writes the beginning of the assistant's next turn (`add_generation_prompt`).
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)
    continues_final_message: bool = False
    begins_answer: bool = True
    reasoning_effort: str | None = None
    effort_is_hint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Raw text, tokenized as is; with a `suffix`, the answer fills in what is between the two.

    Attributes:
        has_special_tokens: add the tokenizer's own special tokens, as `tokenizer(text)` does.
    """

    text: str
    has_special_tokens: bool = True
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids chosen by the client; each must be inside the vocabulary."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar that an answer must follow.

    Attributes:
        source: in llguidance's grammar format.
        field: the request field that asked for it, for messages.
    """

    source: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamShare:
    """An answer's place among the results of a beam search.

    Attributes:
        group: identifies the search; shared by exactly its answers.
        width: number of beams, and of results.
        place: rank of the answer among the results, 0 for the best.
        length_penalty: see `deployments.gateway.beam_search.BeamSearch`.
    """

    group: str
    width: int
    place: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moderation:
    """A request to report the safety classifier's verdicts with the answer.

    Attributes:
        tells_input: report on the input too; of several answers to one prompt, only the first does.
        blocks_input, blocks_output: block flagged text even if the server's own policy does not.
    """

    tells_input: bool = True
    blocks_input: bool = False
    blocks_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What every request to a model says.

    Attributes:
        request_id: as sent in `x-request-id`; unique.
        model: public name of a base model, an adapter or a cross-encoder.
        tenant: whose share of the engine it uses; empty for that of the salt.
        salt: prefix-cache isolation.
        priority: lower is served first.
        timeout_s: seconds from its arrival until the deadline; None for none.
        trace_parent: the client's `traceparent` header.
        reception: when it arrived, and what has happened to it since.
    """

    request_id: str
    model: str
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    trace_parent: str = ""
    reception: Reception = field(default_factory=Reception, compare=False, repr=False)


AnyRequest = TypeVar("AnyRequest", bound=ClientRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ClientRequest):
    """A request for one answer.

    Attributes:
        params: sampling parameters; the gateway overwrites `max_tokens`.
        open_params: names of parameters that the request does not set; the model's defaults apply.
        max_tokens: requested bound, 0 for no answer beside the echo, None for the rest of the context.
        max_tokens_field: the client's name for it.
        clips_max_tokens: clip `max_tokens` to the room in the context; otherwise refuse a request that exceeds it.
        stop: stop strings; the text ends before the first of them.
        keeps_stop: the text ends behind it instead, and with the text of one of the request's stop tokens.
        shows_special: special tokens are part of the text.
        returns_token_ids: return the token ids of the prompt and of the answer, too.
        bad_words: strings that the answer never contains, with or without a space before them.
        dry_breakers: sequence breakers of the DRY penalty in `params`, as text; the gateway derives the token ids.
        grammar: constrains the content, not reasoning or tool calls; None for any text.
        tool_use: how it may call tools; None if there are none.
        echoes: whether to return the prompt's text too.
        beams: the beam search that the answer comes from; None for sampling.
        moderation: None to report no safety verdicts.
        prediction: approximate expected text of the answer; it affects only speed.
        retention_s: as in `engine.request.Request`.
        siblings: of all answers to the client's request.
    """

    prompt: Prompt
    params: SamplingParams
    open_params: frozenset[str] = frozenset()
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    clips_max_tokens: bool = False
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    shows_special: bool = False
    returns_token_ids: bool = False
    bad_words: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] = ()
    grammar: Grammar | None = None
    tool_use: ToolUse | None = None
    echoes: bool = False
    beams: BeamShare | None = None
    moderation: Moderation | None = None
    prediction: str = ""
    retention_s: float = 0.0
    siblings: Siblings = field(default_factory=Siblings, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What `/v1/models` shows for one servable name.

    Attributes:
        parent: name of the base model if this is an adapter, else None.
        task: "generate", "embed" for a model that only computes embeddings, or "score" for a cross-encoder.
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
    """Whether every part that an answer needs has a replica that makes progress.

    Attributes:
        state_by_model: "ready", or one sentence on what is wrong.
        state_by_part: likewise for other parts: tokenizer, safety classifier, cross-encoders, and a draining gateway.
    """

    state_by_model: dict[str, str]
    state_by_part: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return all(state == READY for state in (*self.state_by_model.values(), *self.state_by_part.values()))
