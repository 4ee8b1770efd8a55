"""Maps checkpoint tensors to decoder parameters; loading uses no other mapping.

The decoder's layers know nothing of files. Projections that read the same input are one parameter, stacked along their
output rows in the order given here, which is also the order of `adapters.weights.FUSED_GROUPS`. Experts are stacked
likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from engine.decoder.experts import ExpertSpec
from engine.decoder.families import ExpertNames
from engine.decoder.spec import SHARED_EXPERT, DecoderSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""Ignored: rotary frequencies of old exports, implied by config.json, and KV cache scales; the engine has its own."""
PREFIX_BY_PART = {"language_model.": "", "model.language_model.": "model.", "model.text_model.": "model."}
"""Prefixes of a text decoder's tensor names in vision-language checkpoints, mapped to those of a standalone one."""
SIGHT = tuple(f"{at}{part}." for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector", "visual"))
"""Prefixes of the other tensor names of such a checkpoint."""
SIGHT_BESIDE = "visual."
"""Prefix of the others where the decoder has a standalone one's names: Qwen2-VL and Qwen2.5-VL as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParameter:
    """One parameter of the decoder.

    Attributes:
        name: its name in the decoder, `layers.3.qkv.weight`.
        parts: (tensor name in the checkpoint, shape) in stacking order.
        offset: added to the stored values.
        is_wide: float32, whatever dtype the other parameters have.
        is_transposed: parts are stored with their last two dimensions swapped, [experts, in, out]; None: if their
            shape says so.
        is_paired: gate and up outputs are stored interleaved; the parameter has all of gate, then all of up.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    offset: float = 0.0
    is_wide: bool = False
    is_transposed: bool | None = False
    is_paired: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked parts."""
        return sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def shapes_in_file(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that a part of `shape` may have in the checkpoint."""
        if self.is_transposed is False:
            return (shape,)
        swapped = (*shape[:-2], shape[-1], shape[-2])
        return (swapped,) if self.is_transposed else (shape, swapped)


def parameters(spec: DecoderSpec) -> Iterator[DecoderParameter]:
    """Yield every parameter of a decoder."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield _one("embedding", EMBEDDING, (spec.vocab_size, hidden))
    for layer, form in enumerate(spec.layers):
        here, there = f"layers.{layer}", f"model.layers.{layer}"
        norms = (
            ("input_norm", spec.norms.before_attention),
            ("o_norm", spec.norms.after_attention),
            ("mlp_norm", spec.norms.before_mlp),
            ("down_norm", spec.norms.after_mlp),
        )
        for name, tensor in norms:
            if tensor is not None:
                yield _norm(spec, f"{here}.{name}", f"{there}.{tensor}", hidden)
        qkv = tuple(spec.stored_widths()["qkv_proj"].items())
        yield from _linear(f"{here}.qkv", f"{there}.self_attn", qkv, hidden, has_bias=spec.qkv_bias)
        if spec.has_qk_norm:
            q_width, k_width = spec.head_dim, spec.head_dim
            if spec.norms_heads_together:
                q_width, k_width = spec.q_size, spec.kv_size
            yield _norm(spec, f"{here}.q_norm", f"{there}.self_attn.q_norm", q_width)
            yield _norm(spec, f"{here}.k_norm", f"{there}.self_attn.k_norm", k_width)
        if spec.has_sinks:
            sinks = ((f"{there}.self_attn.sinks", (spec.num_heads,)),)
            yield DecoderParameter(name=f"{here}.sinks", parts=sinks, is_wide=True)
        o = (("o_proj", hidden),)
        yield from _linear(f"{here}.o", f"{there}.self_attn", o, spec.q_size, has_bias=spec.o_bias)
        if spec.experts is not None and form.is_sparse:
            yield from _mixture(spec, spec.experts, here, there)
            continue
        gate_up = tuple(spec.stored_widths()["gate_up_proj"].items())
        yield from _linear(f"{here}.gate_up", f"{there}.mlp", gate_up, hidden, has_bias=spec.mlp_bias)
        yield from _linear(f"{here}.down", f"{there}.mlp", (("down_proj", hidden),), inner, has_bias=spec.mlp_bias)
    yield _norm(spec, "norm", "model.norm", hidden)
    if not spec.is_tied:
        yield _one("head", HEAD, (spec.vocab_size, hidden))


def _mixture(spec: DecoderSpec, experts: ExpertSpec, here: str, there: str) -> Iterator[DecoderParameter]:
    names, hidden, inner = spec.expert_names, spec.hidden_size, experts.inner_size
    block = f"{there}.{names.block}"
    yield _one(f"{here}.router", f"{block}.{names.router}.weight", (experts.count, hidden))
    if names.are_paired:
        yield _one(f"{here}.router_bias", f"{block}.{names.router}.bias", (experts.count,))
    products = (("gate_up", names.gate_up, inner, hidden), ("down", (names.down,), hidden, inner))
    for name, modules, out, depth in products:
        if names.are_one:
            width = 2 * out if name == "gate_up" else out
            yield from _stacked(names, f"{here}.experts.{name}", f"{block}.{modules[0]}", experts.count, width, depth)
            continue
        each = [f"{block}.experts.{expert}.{module}.weight" for expert in range(experts.count) for module in modules]
        yield DecoderParameter(name=f"{here}.experts.{name}", parts=tuple((part, (out, depth)) for part in each))
    if experts.shared_size:
        yield _one(f"{here}.shared_gate", f"{block}.{SHARED_EXPERT}_gate.weight", (1, hidden))
        gate_up = tuple((module, experts.shared_size) for module in names.gate_up)
        yield from _linear(f"{here}.shared_gate_up", f"{block}.{SHARED_EXPERT}", gate_up, hidden, has_bias=False)
        down = ((names.down, hidden),)
        yield from _linear(f"{here}.shared_down", f"{block}.{SHARED_EXPERT}", down, experts.shared_size, has_bias=False)


def _stacked(
    names: ExpertNames, here: str, tensor: str, count: int, out: int, depth: int
) -> Iterator[DecoderParameter]:
    if not names.are_bare:
        yield _one(here, f"{tensor}.weight", (count, out, depth))
        return
    is_paired = names.are_paired and here.endswith(".gate_up")
    is_transposed = names.are_paired or None
    yield DecoderParameter(
        name=here, parts=((tensor, (count, out, depth)),), is_transposed=is_transposed, is_paired=is_paired
    )
    if names.are_paired:
        yield DecoderParameter(name=f"{here}_bias", parts=((f"{tensor}_bias", (count, out)),), is_paired=is_paired)


def _one(name: str, tensor: str, shape: tuple[int, ...]) -> DecoderParameter:
    return DecoderParameter(name=name, parts=((tensor, shape),))


def _norm(spec: DecoderSpec, name: str, module: str, width: int) -> DecoderParameter:
    parts = ((f"{module}.weight", (width,)),)
    return DecoderParameter(name=name, parts=parts, offset=spec.norms.offset, is_wide=spec.norms.is_wide)


def _linear(
    name: str, parent: str, modules: tuple[tuple[str, int], ...], in_features: int, *, has_bias: bool
) -> Iterator[DecoderParameter]:
    yield DecoderParameter(
        name=f"{name}.weight",
        parts=tuple((f"{parent}.{module}.weight", (out, in_features)) for module, out in modules),
    )
    if has_bias:
        yield DecoderParameter(
            name=f"{name}.bias", parts=tuple((f"{parent}.{module}.bias", (out,)) for module, out in modules)
        )
