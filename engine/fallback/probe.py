"""Traces a transformers model without weights to record what each layer requires of attention.

The model is built on torch's meta device, which has shapes only, with an attention function that records its
arguments. Masks come as functions of two positions, so a window is recognized whatever the model calls it, and so is
anything else that a mask hides: only masks that the engine's kernels compute are accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging

from engine.decoder.model_spec import Mixtures
from engine.errors import CheckpointError
from engine.fallback.experts import activation_of
from engine.fallback.rotations import NotedRotations, Rotation
from engine.fallback.state_caches import NotedStates
from engine.fallback.states import cache_name

NAME = "antiphon_probe"
FAR = 1_000_003
"""A position beyond any window, and not at the start of a chunk."""
NUM_TOKENS = 11
"""Hardly a dimension of a model, so that rows are recognized as tokens."""
DTYPE = torch.bfloat16
"""The meta device implements expert matmuls for this dtype only."""
STILL = "default"
"""Type of rotary embedding whose angles depend on the position alone."""
PASSED_ON = ("dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "logits_to_keep")
"""Arguments that the engine's attention handles or may ignore; others must be None, a boolean or a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer requires of attention; `value_dim` is at most `head_dim`.

    Attributes:
        layer: the module's `layer_idx`.
        source: the first layer with the same keys and values, usually `layer` itself.
        window: 0 for none.
        softcap: 0 for none.
        rotation: that of queries and keys just before, if it may be left to attention.
    """

    layer: int
    source: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    rotation: Rotation | None = None


class Tried(NamedTuple):
    """A model and what it requires: attention, for each layer that attends, recurrent states, and experts, if any.

    `linears` are the names of linear modules that are called with one row for each token, in order; `experts` those of
    modules of experts whose sizes are those of `mixtures`.
    """

    model: PreTrainedModel
    calls: list[AttentionCall]
    states: NotedStates
    mixtures: Mixtures | None
    linears: Collection[str]
    experts: Collection[str]


def try_out(model_class: type[PreTrainedModel], config: PretrainedConfig, what: str) -> Tried:
    """Build a model on the meta device, run it there, and return it with what its layers require.

    Raises:
        CheckpointError: transformers refuses the configuration, or the model cannot run on the meta device, or requires
            something unsupported; names the first such.
    """
    notes = _Notes()
    AttentionInterface.register(NAME, notes.attend)
    AttentionMaskInterface.register(NAME, _mask)
    model = _on_no_device(model_class, config, what)
    notes.watch(model)
    _run(model, what)
    calls = notes.calls
    if any(call.source != call.layer for call in calls):
        # Keys of an earlier layer would be rotated by angles of this one.
        calls = [replace(call, rotation=None) for call in calls]
    if (reason := _why_not(model, calls, notes.states)) is not None:
        raise CheckpointError(f"{what} is not served: {reason}")
    linears = [name for name, counts in notes.rows_by_linear.items() if counts == {NUM_TOKENS}]
    mixtures, experts = None, []
    if notes.mixtures:
        mixtures = notes.mixtures[0]._replace(num_layers=len(notes.mixtures))
        sizes = mixtures.num_experts, mixtures.inner
        experts = [name for name, own in notes.sizes_by_experts.items() if own == sizes]
    return Tried(model, calls, notes.states, mixtures, linears, experts)


def keep_angles(model: PreTrainedModel) -> None:
    """Make rotary embeddings keep their short-context angles; they would adapt to the longest sequence of a step."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = STILL
        elif isinstance(kind, dict):
            module.rope_type = dict.fromkeys(kind, STILL)
        if kind is not None:
            _keep_magnitude(module)


def _keep_magnitude(module: Any) -> None:
    """Make a rotary embedding keep its factor for short contexts, if it has another one for long ones.

    Phi-3.5-MoE's chooses by the longest sequence of a step, and by the type that its configuration has.
    """
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if (magnitude := rope.get("short_mscale")) is not None:
        # A copy: other modules share the original.
        module.config = copy.copy(config)
        module.config.rope_parameters = {**rope, "rope_type": STILL, "attention_factor": magnitude}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers from advising packages for layers that it computes here only to compare."""
    advice = logging.get_logger("transformers.integrations.hub_kernels")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advice.setLevel(level)


def _on_no_device(model_class: type[PreTrainedModel], config: PretrainedConfig, what: str) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=NAME, dtype=DTYPE)
    except Exception as error:
        _check_attention(model_class, what)
        name = model_class.__name__
        raise CheckpointError(f"transformers cannot build a {name} from its config.json: {error}") from error
    keep_angles(model)
    return model


def _why_not(model: PreTrainedModel, calls: Sequence[AttentionCall], states: NotedStates) -> str | None:
    """Return why the engine does not serve a model that has been run; None if it does."""
    if not calls:
        return "it has no attention layer."
    if "position_ids" not in signature(model.forward).parameters:
        # It would take the first token of each step for the first of its request.
        return "it cannot be told the positions of its tokens."
    attending = [call.layer for call in calls]
    if attending != sorted(set(attending)):
        return "a layer calls attention more than once."
    idle = set(range(model.config.num_hidden_layers)) - {*attending, *(key.layer for key in states.form_by_key)}
    if idle and not states.form_by_key:
        return f"its layer {min(idle)} has neither a KV cache nor a known recurrent state."
    return None


def _run(model: PreTrainedModel, what: str) -> None:
    """Run the model on a few tokens without data."""
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(NUM_TOKENS, device="meta").unsqueeze(0)
    nothing_padded = torch.ones_like(tokens).as_subclass(_Ones)
    try:
        with torch.inference_mode(), quietly():
            model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=nothing_padded,
                use_cache=False,
                logits_to_keep=positions[0],
            )
    except _NotServed as error:
        raise CheckpointError(f"{what} is not served: {error}") from None
    except Exception as error:
        _check_attention(type(model), what)
        raise CheckpointError(f"{what} is not served: it cannot be traced on the meta device ({error})") from error


def _check_attention(model_class: type[PreTrainedModel], what: str) -> None:
    """Refuse a class whose own attention has failed with the probe's arguments; the error would not tell that.

    Raises:
        CheckpointError: transformers cannot replace its attention.
    """
    if not model_class._supports_attention_backend:
        raise CheckpointError(f"{what} is not served: transformers cannot replace its attention by the engine's.")


class _NotServed(Exception):
    """A model requires something that the engine does not support."""


class _Notes:
    """What the modules of a model ask for while it runs.

    Attributes:
        calls: those of attention.
        states: the recurrent states that are kept.
        mixtures: one for each call of a module of experts.
        sizes_by_experts: number of experts, and intermediate size, of each such module.
        rows_by_linear: the numbers of rows that each linear module is called with; -1 if its input has a name.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.states = NotedStates(DTYPE)
        self.mixtures: list[Mixtures] = []
        self.sizes_by_experts: dict[str, tuple[int, int]] = {}
        self.rows_by_linear: dict[str, set[int]] = {}
        # The keys and values of `calls`.
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rotations = NotedRotations()

    def watch(self, model: PreTrainedModel) -> None:
        """Take notes of the modules of a model; modifies them."""
        for name, module in model.named_modules():
            self._rotations.watch(name, module)
            if (told := cache_name(module)) is not None:
                module.forward = partial(self._with_states, module.forward, name, told)
        for name, module in model.named_modules():
            if activation_of(module) is not None:
                module.register_forward_pre_hook(self._note_experts, with_kwargs=True)
                self.sizes_by_experts[name] = module.num_experts, module.down_proj.shape[-1]
            if type(module) is torch.nn.Linear:
                self.rows_by_linear[name] = set()
                module.register_forward_pre_hook(partial(self._note_rows, name))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **told: Any,
    ) -> tuple[torch.Tensor, None]:
        """Take note of a call, by transformers' interface, with [1, heads, tokens, head_dim].

        Raises:
            _NotServed: the engine's attention does not compute it.
        """
        # A mask that the model has modified is no longer known, and has no window.
        window = getattr(attention_mask, "window", None)
        if window is None:
            raise _NotServed("its attention mask is neither causal nor a causal sliding window")
        for name, argument in told.items():
            if name not in PASSED_ON and not (argument is None or isinstance(argument, bool | str)):
                raise _NotServed(f"its attention passes an unsupported argument, {name}")
        if value.shape[-1] > key.shape[-1]:
            raise _NotServed(f"its values have {value.shape[-1]} dimensions, more than its keys, {key.shape[-1]}")
        scale, layer = told.get("scaling"), getattr(module, "layer_idx", -1)
        is_same = (kv[0] is key and kv[1] is value for kv in self._seen)
        source = next((call.layer for call, same in zip(self.calls, is_same, strict=True) if same), layer)
        self._seen.append((key, value))
        self.calls.append(
            AttentionCall(
                layer=layer,
                source=source,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=key.shape[3] ** -0.5 if scale is None else float(scale),
                window=window,
                softcap=float(told.get("softcap") or 0.0),
                rotation=self._rotations.of(query, key),
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _with_states(self, forward: Callable[..., Any], name: str, cache: str, /, *arguments: Any, **told: Any) -> Any:
        """Call a module with a cache that records its states."""
        outer, self.states.module = self.states.module, name
        try:
            result = forward(*arguments, **{**told, cache: self.states})
        finally:
            self.states.module = outer
        if name in self.states.modules and not isinstance(result, torch.Tensor):
            raise _NotServed("a recurrent layer returns more than hidden states")
        return result

    def _note_experts(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take note of one layer's experts, which are called with the hidden states, the choice and its weights."""
        choice = arguments[1] if len(arguments) > 1 else named["top_k_index"]
        self.mixtures.append(Mixtures(1, module.num_experts, choice.shape[-1], module.down_proj.shape[-1]))

    def _note_rows(self, name: str, module: torch.nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        self.rows_by_linear[name].add(arguments[0].numel() // module.in_features if arguments else -1)


class _Ones(torch.Tensor):
    """Ones on the meta device; a comparison with them counts as true."""

    def __bool__(self) -> bool:
        return True


class _Mask(torch.Tensor):
    """A mask on the meta device that says what it hides.

    Attributes:
        window: 0 for a causal mask; None for one that is neither causal nor a sliding window.
    """

    window: int | None


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **told: Any) -> torch.Tensor:
    mask = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(_Mask)
    mask.window = _window(mask_function, told.get("local_size"))
    return mask


def _window(mask_function: Callable[..., Any], told: int | None) -> int | None:
    """Return a mask's window (0 for causal) from what a token far from the first sees; None for any other mask."""

    def sees(key: int) -> bool:
        batch, head, query, kv = (torch.tensor(number) for number in (0, 0, FAR, key))
        return bool(mask_function(batch, head, query, kv))

    try:
        if not sees(FAR) or sees(FAR + 1):
            return None
        if told is None:
            return 0 if sees(0) else None
        return told if sees(FAR - told + 1) and not sees(FAR - told) else None
    except RuntimeError:
        return None
