"""Differences between decoder families (biases, norms, scales, defaults), one table row per family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Switch = bool | str
"""A constant fixed by the family's code, or the name of the config.json field (false by default) that decides."""
Activation = Literal["silu", "gelu", "clamped"]
"""Defined in `kernels.gated_activation.reference`."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
"""Activations by their names in checkpoints."""


class Norms(NamedTuple):
    """The norms of a layer, by their names in checkpoints; None for a missing norm.

    Attributes:
        before_attention, before_mlp: applied to the sublayer's input.
        after_attention, after_mlp: applied to the sublayer's output, before it is added to the residual stream.
        offset: added to the stored weights: 1 if the checkpoint stores weight - 1.
        is_wide: weights are float32, and the result is rounded only after multiplying by them.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    offset: float = 0.0
    is_wide: bool = False


PLAIN_NORMS = Norms()


class ExpertNames(NamedTuple):
    """Names of the parts of a mixture of experts in checkpoints.

    Attributes:
        block: the module in place of the MLP; it contains all the others.
        router: the router.
        gate_up, down: an expert's linear modules, `experts.7.down_proj`.
        are_one: all experts' matrices are one tensor, [experts, out, in], directly in the block.
        are_bare: that tensor is a parameter without `.weight`, [experts, in, out] or, unless paired, as its shape says.
        are_paired: its gate and up outputs are interleaved; it has a `_bias` parameter, and the router has a bias.
        adapted: name of the block in adapters that change all experts at once; None if the same.
    """

    block: str = "mlp"
    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    are_one: bool = False
    are_bare: bool = False
    are_paired: bool = False
    adapted: str | None = None


PLAIN_NAMES = ExpertNames()
STACKED_NAMES = ExpertNames(gate_up=("experts.gate_up_proj",), down="experts.down_proj", are_one=True, are_bare=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFields:
    """The mixture of experts of a family.

    Attributes:
        count, inner, shared: config.json fields with the number of experts, the intermediate size of each, and that of
            the shared expert; `shared` is None if there is none.
        is_normed: the router weights of a token's experts are normalized to sum to 1.
        leaves_some_dense: `decoder_sparse_step` and `mlp_only_layers` apply.
    """

    count: str
    inner: str
    is_normed: Switch
    shared: str | None = None
    leaves_some_dense: bool = False
    names: ExpertNames = PLAIN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What config.json leaves out because the family's code defines it.

    Attributes:
        has_qk_norm: each query and key head is normalized before the rotary embedding.
        norms_heads_together: all query heads are normalized as one vector, and all key heads as another.
        uses_window: whether `sliding_window` applies.
        window: default of `sliding_window`.
        num_full_layers: default of `max_window_layers`, the number of first layers without a window; 0 to ignore it.
        full_every: default n of `sliding_window_pattern`: every n-th layer has no window; 0 to ignore it.
        unrotated_every: default n of `no_rope_layer_interval`: every n-th layer has no rotary embedding, and only
            those layers have a window; 0 to ignore it.
        is_fused: q, k and v are one module, `qkv_proj`, and gate and up are one, `gate_up_proj`.
        rotates_partly: `partial_rotary_factor` applies.
        theta: default of `rope_theta`.
        rope: default of `rope_parameters`.
        original_max_len: default of `original_max_position_embeddings`, whatever the rope block says; 0 for none.
        local_theta: default of `rope_local_base_freq`, the theta of layers with a window; None for the same theta.
        activation: default of `hidden_activation`, or `hidden_act`.
        clamps: the activation is the clamped one, whatever config.json says.
        has_sinks: each head has a sink, as defined in `kernels.paged_attention.reference`.
        scales: fields with scale factors, read by `engine.decoder.scales`, and their defaults.
        scales_embedding: the embedding is multiplied by the square root of its width.
        is_tied: default of `tie_word_embeddings`.
        eps: default of `rms_norm_eps`.
        mixture: the mixture of experts; None for MLPs in all layers.
        came_with_code: checkpoints bundle code (`auto_map`), but it defines what is by now the standard family.
        unserved: fields that are supported with this value only.
    """

    qkv_bias: Switch = False
    o_bias: Switch = False
    mlp_bias: Switch = False
    has_qk_norm: bool = False
    norms_heads_together: bool = False
    uses_window: Switch = False
    window: int | None = 4096
    num_full_layers: int = 0
    full_every: int = 0
    unrotated_every: int = 0
    is_fused: bool = False
    rotates_partly: bool = False
    theta: float = 10_000.0
    rope: Mapping[str, object] = field(default_factory=dict)
    original_max_len: int = 0
    local_theta: float | None = None
    activation: str = "silu"
    clamps: bool = False
    has_sinks: bool = False
    norms: Norms = PLAIN_NORMS
    scales: Mapping[str, float | None] = field(default_factory=dict)
    scales_embedding: bool = False
    is_tied: bool = False
    eps: float = 1e-6
    mixture: MixtureFields | None = None
    came_with_code: bool = False
    unserved: Mapping[str, object] = field(default_factory=dict)


GEMMA_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
    is_wide=True,
)

OLMO_NORMS = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    is_wide=True,
)

GRANITE_SCALES = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)

QWEN3_VL_MOE = "Qwen3VLMoeForCausalLM"
"""Not a class of transformers, which has this decoder only inside a vision-language model."""

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(uses_window=True),
    "MinistralForCausalLM": Family(uses_window=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, uses_window="use_sliding_window", num_full_layers=28),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        uses_window="use_sliding_window",
        num_full_layers=28,
    ),
    "Gemma2ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        uses_window=True,
        full_every=2,
        activation="gelu_pytorch_tanh",
        norms=GEMMA_NORMS,
        scales={"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        scales_embedding=True,
        is_tied=True,
    ),
    "Gemma3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        uses_window=True,
        full_every=6,
        theta=1_000_000.0,
        local_theta=10_000.0,
        activation="gelu_pytorch_tanh",
        norms=GEMMA_NORMS,
        # The family's code caps no scores, whatever attn_logit_softcapping says.
        scales={"query_pre_attn_scalar": 256, "final_logit_softcapping": None},
        scales_embedding=True,
        is_tied=True,
    ),
    "GraniteForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        scales=GRANITE_SCALES,
    ),
    "SmolLM3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        uses_window="use_sliding_window",
        window=None,
        unrotated_every=4,
        theta=2_000_000.0,
        is_tied=True,
    ),
    "Olmo2ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        norms_heads_together=True,
        norms=OLMO_NORMS,
        eps=1e-5,
    ),
    "Olmo3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        norms_heads_together=True,
        uses_window=True,
        full_every=4,
        theta=500_000.0,
        local_theta=500_000.0,
        norms=OLMO_NORMS,
        eps=1e-5,
    ),
    "Phi3ForCausalLM": Family(
        uses_window=True,
        window=None,
        is_fused=True,
        rotates_partly=True,
        original_max_len=4096,
        eps=1e-5,
        came_with_code=True,
    ),
    "MixtralForCausalLM": Family(
        uses_window=True,
        window=None,
        theta=1_000_000.0,
        eps=1e-5,
        mixture=MixtureFields(
            count="num_local_experts",
            inner="intermediate_size",
            is_normed=True,
            names=ExpertNames(block="block_sparse_moe", gate_up=("w1", "w3"), down="w2", adapted="mlp"),
        ),
    ),
    "OlmoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        norms_heads_together=True,
        eps=1e-5,
        mixture=MixtureFields(count="num_experts", inner="intermediate_size", is_normed="norm_topk_prob"),
        unserved={"clip_qkv": None},
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        mixture=MixtureFields(
            count="num_experts",
            inner="moe_intermediate_size",
            is_normed="norm_topk_prob",
            shared="shared_expert_intermediate_size",
            leaves_some_dense=True,
        ),
        unserved={"qkv_bias": True, "use_sliding_window": False},
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        uses_window="use_sliding_window",
        mixture=MixtureFields(
            count="num_experts",
            inner="moe_intermediate_size",
            is_normed="norm_topk_prob",
            leaves_some_dense=True,
        ),
    ),
    QWEN3_VL_MOE: Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        has_qk_norm=True,
        mixture=MixtureFields(
            count="num_experts",
            inner="moe_intermediate_size",
            is_normed=True,
            leaves_some_dense=True,
            names=STACKED_NAMES,
        ),
    ),
    "GraniteMoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        scales=GRANITE_SCALES,
        mixture=MixtureFields(
            count="num_local_experts",
            inner="intermediate_size",
            is_normed=True,
            names=ExpertNames(
                block="block_sparse_moe",
                router="router.layer",
                gate_up=("input_linear",),
                down="output_linear",
                are_one=True,
            ),
        ),
    ),
    "GptOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        uses_window=True,
        window=128,
        full_every=2,
        theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        clamps=True,
        has_sinks=True,
        norms=Norms(is_wide=True),
        eps=1e-5,
        mixture=MixtureFields(
            count="num_local_experts",
            inner="intermediate_size",
            is_normed=True,
            names=STACKED_NAMES._replace(router="router", are_paired=True),
        ),
        unserved={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
}

_BASES = {"Gemma3ForCausalLM": "Gemma3TextModel"}
DECODER_BY_BASE = {_BASES.get(name, f"{name.removesuffix('ForCausalLM')}Model"): name for name in FAMILIES}
"""Decoder architecture by its base-model architecture, which has no output matrix (saved by embedding models)."""
