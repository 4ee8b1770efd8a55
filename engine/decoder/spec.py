"""What a decoder computes, and the shapes of its modules: the frozen `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.experts import ExpertSpec
from engine.decoder.families import PLAIN_NAMES, Activation, ExpertNames, Norms
from engine.decoder.model_spec import Mixtures, ModelSpec
from engine.decoder.scales import Scales
from engine.decoder.stored_mxfp4 import StoredMxfp4

SHARED_EXPERT = "shared_expert"
"""Module name of the shared expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder that `engine.decoder.decoder` computes: gated MLPs or mixtures of experts, and RMS norms.

    Attributes:
        intermediate_size: of dense MLPs; experts have their own.
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        has_sinks: each head has a sink, as defined in `kernels.paged_attention.reference`.
        has_qk_norm: each query and key head is normalized before the rotary embedding (Qwen3, Gemma 3).
        norms_heads_together: all query heads are normalized as one vector, and all key heads as another (OLMo).
        is_fused: q, k and v are one module, and so are gate and up (Phi-3).
        norms: names of a layer's norms, and how they are computed.
        activation: of the gate.
        scales: the family's scale factors and soft caps.
        experts: geometry of the mixtures in sparse layers; None if the family has none.
        expert_names: their names in the checkpoint.
    """

    intermediate_size: int
    rms_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    has_sinks: bool
    has_qk_norm: bool
    norms_heads_together: bool
    is_fused: bool
    norms: Norms
    activation: Activation
    scales: Scales
    experts: ExpertSpec | None = None
    expert_names: ExpertNames = PLAIN_NAMES

    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of everything that takes an adapter, as `adapters.validate.ModuleShapes`."""
        linear = self.adapted_shapes()
        shapes: dict[str, tuple[int, ...]] = dict(linear)
        biases = {"q_proj": self.qkv_bias, "k_proj": self.qkv_bias, "v_proj": self.qkv_bias, "o_proj": self.o_bias}
        for name, (_, out) in linear.items():
            if biases.get(name.rpartition(".")[2], self.mlp_bias):
                shapes[f"{name}.bias"] = (out,)
        return (
            shapes
            | self._adapted_experts()
            | self._adapted_norms()
            | {
                "model.embed_tokens": (self.vocab_size, self.hidden_size),
                "lm_head": (self.hidden_size, self.vocab_size),
            }
        )

    def mixtures(self) -> Mixtures | None:
        """As `ModelSpec` says; shared experts are none of these."""
        if self.experts is None:
            return None
        num_layers = sum(form.is_sparse for form in self.layers)
        return Mixtures(num_layers, self.experts.count, self.experts.chosen, self.experts.inner_size)

    def widths(self) -> dict[str, dict[str, int]]:
        """Return the output width of each module that reads a shared input, by fused projection and module name."""
        qkv = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        return {"qkv_proj": qkv, "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), self.intermediate_size)}

    def stored_widths(self) -> dict[str, dict[str, int]]:
        """Return `widths` by the checkpoint's modules, which may themselves be fused."""
        if not self.is_fused:
            return self.widths()
        return {name: {name: sum(parts.values())} for name, parts in self.widths().items()}

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) features of every linear module of the layers, by name.

        Excludes the router, which stays in full precision when linear modules are quantized, and experts' matrices
        that share one tensor.
        """
        return self._by_layer(self._expert_shapes(), self._mlp_shapes())

    def stored_shapes(self) -> dict[str, tuple[int, int]]:
        """Return `linear_shapes` of the modules that `stored` applies to; experts in one tensor count as one module."""
        if not isinstance(self.stored, StoredMxfp4):
            return self.linear_shapes()
        experts, names = self.experts, self.expert_names
        if experts is None or not names.are_paired:
            return {}
        shapes = {
            f"{names.block}.{names.gate_up[0]}": (self.hidden_size, 2 * experts.inner_size),
            f"{names.block}.{names.down}": (experts.inner_size, self.hidden_size),
        }
        places = [layer for layer, form in enumerate(self.layers) if form.is_sparse]
        return {f"model.layers.{layer}.{name}": shape for layer in places for name, shape in shapes.items()}

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """Return `linear_shapes` of the modules that take an adapter; experts are separate."""
        return self._by_layer({}, self._mlp_shapes())

    def _adapted_norms(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the norms, which adapters may replace, by their names in checkpoints."""
        norms = self.norms
        places = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        shapes: dict[str, tuple[int, ...]] = {name: (self.hidden_size,) for name in places if name is not None}
        if self.has_qk_norm:
            widths = (self.q_size, self.kv_size) if self.norms_heads_together else (self.head_dim, self.head_dim)
            shapes |= {f"self_attn.{name}": (width,) for name, width in zip(("q_norm", "k_norm"), widths, strict=True)}
        every = {
            f"model.layers.{layer}.{name}": shape for layer in range(self.num_layers) for name, shape in shapes.items()
        }
        return every | {"model.norm": (self.hidden_size,)}

    def _adapted_experts(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what takes an adapter in the mixtures."""
        experts, names = self.experts, self.expert_names
        if experts is None:
            return {}
        count, hidden, inner = experts.count, self.hidden_size, experts.inner_size
        halves = (inner, 2) if names.are_paired else (2, inner)
        stacks = f"{names.adapted or names.block}.experts"
        shapes: dict[str, tuple[int, ...]] = {}
        if not names.are_one:
            shapes |= {f"{names.block}.experts.{name}": (count, hidden, inner) for name in names.gate_up}
            shapes[f"{names.block}.experts.{names.down}"] = count, inner, hidden
        shapes |= {f"{stacks}.gate_up_proj": (count, hidden, *halves), f"{stacks}.down_proj": (count, inner, hidden)}
        # Whoever changes all experts at once calls the router by the same library's name.
        blocks = names.block, names.adapted or names.block
        shapes |= dict.fromkeys((f"{block}.{names.router}" for block in blocks), (hidden, count))
        if width := experts.shared_size:
            shared = f"{names.block}.{SHARED_EXPERT}"
            shapes |= {f"{shared}.{name}": (hidden, width) for name in names.gate_up}
            shapes[f"{shared}.{names.down}"] = width, hidden
        places = [layer for layer, form in enumerate(self.layers) if form.is_sparse]
        return {f"model.layers.{layer}.{name}": shape for layer in places for name, shape in shapes.items()}

    def linear_sizes(self) -> set[tuple[int, int]]:
        """Return the distinct (in, out) sizes of all linear modules, experts included."""
        sizes = {*self._attention_shapes().values()}
        if any(not form.is_sparse for form in self.layers):
            sizes |= {*self._mlp_shapes().values()}
        if self.experts is not None:
            widths = {self.experts.inner_size, self.experts.shared_size} - {0}
            sizes |= {size for width in widths for size in ((self.hidden_size, width), (width, self.hidden_size))}
        return sizes

    def _by_layer(
        self, if_sparse: Mapping[str, tuple[int, int]], if_dense: Mapping[str, tuple[int, int]]
    ) -> dict[str, tuple[int, int]]:
        attention = self._attention_shapes()
        return {
            f"model.layers.{layer}.{name}": shape
            for layer, form in enumerate(self.layers)
            for shapes in (attention, if_sparse if form.is_sparse else if_dense)
            for name, shape in shapes.items()
        }

    def _attention_shapes(self) -> dict[str, tuple[int, int]]:
        shapes = {
            f"self_attn.{name}": (self.hidden_size, out) for name, out in self.stored_widths()["qkv_proj"].items()
        }
        return shapes | {"self_attn.o_proj": (self.q_size, self.hidden_size)}

    def _mlp_shapes(self) -> dict[str, tuple[int, int]]:
        widths = self.stored_widths()["gate_up_proj"]
        shapes = {f"mlp.{name}": (self.hidden_size, out) for name, out in widths.items()}
        return shapes | {"mlp.down_proj": (self.intermediate_size, self.hidden_size)}

    def _expert_shapes(self) -> dict[str, tuple[int, int]]:
        experts, names = self.experts, self.expert_names
        if experts is None or names.are_one:
            return {}
        modules = [(f"{names.block}.experts.{expert}", experts.inner_size) for expert in range(experts.count)]
        if experts.shared_size:
            modules.append((f"{names.block}.{SHARED_EXPERT}", experts.shared_size))
        shapes: dict[str, tuple[int, int]] = {}
        for module, inner in modules:
            shapes |= {f"{module}.{name}": (self.hidden_size, inner) for name in names.gate_up}
            shapes[f"{module}.{names.down}"] = inner, self.hidden_size
        return shapes
