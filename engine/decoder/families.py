"""Where the families of decoders differ: by a bias, a norm, a scale, a default. One row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Switch = bool | str
"""What the family's code fixes, or the name of the field of config.json (false by default) that decides."""
Activation = Literal["silu", "gelu", "clamped"]
"""As `kernels.gated_activation.reference` defines them."""
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
"""By the names that checkpoints have for them."""


class Norms(NamedTuple):
    """The norms of a layer, by the names that checkpoints have for them; None where there is none.

    Attributes:
        before_attention, before_mlp: of what a part reads.
        after_attention, after_mlp: of what it adds.
        offset: of weights: 1 where a checkpoint has what they are beyond 1.
        is_wide: weights are float32, and what is normed is rounded once it has met them.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    offset: float = 0.0
    is_wide: bool = False


PLAIN_NORMS = Norms()


class ExpertNames(NamedTuple):
    """What checkpoints call the parts of a mixture of experts.

    Attributes:
        block: the module that stands for an MLP; all others are in it.
        router: what chooses experts.
        gate_up, down: the products of an expert, `experts.7.down_proj`.
        are_one: the experts' matrices lie in one tensor, [experts, out, in], directly in the block.
        are_bare: that tensor is [experts, in, out] and no module's, outputs of gate and up in turn; it has a `_bias`
            beside it, and what chooses has one too.
        adapted: what adapters call the block where they have something for all experts at once; None for the same.
    """

    block: str = "mlp"
    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    are_one: bool = False
    are_bare: bool = False
    adapted: str | None = None


PLAIN_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a family with experts has where others have an MLP.

    Attributes:
        count, inner, shared: the fields that say how many experts there are, how wide one is, and how wide one that
            all tokens meet is; `shared` is None where there is none.
        is_normed: the weights of the experts that a token meets sum to 1.
        leaves_some_dense: `decoder_sparse_step` and `mlp_only_layers` hold.
    """

    count: str
    inner: str
    is_normed: Switch
    shared: str | None = None
    leaves_some_dense: bool = False
    names: ExpertNames = PLAIN_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a config.json leaves unsaid because the family's code says it.

    Attributes:
        has_qk_norm: each query and key head is normalised before the rotation.
        norms_heads_together: all heads of queries are normalised as one vector, and so are those of keys.
        uses_window: whether `sliding_window` holds.
        window: default of `sliding_window`.
        num_full_layers: default of `max_window_layers`: so many layers at the beginning have no window.
        full_every: default of `sliding_window_pattern`: every so-manieth layer has none; 0 for no such pattern.
        unrotated_every: default of `no_rope_layer_interval`: every so-manieth layer does not rotate; 0 for none. Where
            there are such they alone have a window.
        is_fused: q, k and v, and gate and up, are modules in one, `qkv_proj` and `gate_up_proj`.
        rotates_partly: `partial_rotary_factor` holds.
        theta: default of `rope_theta`.
        rope: default of `rope_parameters`.
        local_theta: default of `rope_local_base_freq`, which layers with a window have instead; None for the same.
        activation: default of `hidden_activation`, or `hidden_act`.
        clamps: the gate is the clamped one, of whatever else config.json says.
        has_sinks: each head has a sink, as `kernels.paged_attention.reference` defines it.
        scales: fields that scale something, as `engine.decoder.scales` reads them, and their defaults.
        scales_embedding: the embedding is multiplied by the root of its width.
        is_tied: default of `tie_word_embeddings`.
        mixture: of experts; None for MLPs in all layers.
        came_with_code: checkpoints have code (`auto_map`) that defines the family as all know it by now.
        unserved: fields that ask for what is not served unless they have this value.
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
    local_theta: float | None = None
    activation: str = "silu"
    clamps: bool = False
    has_sinks: bool = False
    norms: Norms = PLAIN_NORMS
    scales: Mapping[str, float | None] = field(default_factory=dict)
    scales_embedding: bool = False
    is_tied: bool = False
    mixture: Mixture | None = None
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
        scales={"query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None},
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
    ),
    "Phi3ForCausalLM": Family(uses_window=True, window=None, is_fused=True, rotates_partly=True, came_with_code=True),
    "MixtralForCausalLM": Family(
        uses_window=True,
        window=None,
        theta=1_000_000.0,
        mixture=Mixture(
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
        mixture=Mixture(count="num_experts", inner="intermediate_size", is_normed="norm_topk_prob"),
        unserved={"clip_qkv": None},
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        mixture=Mixture(
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
        mixture=Mixture(
            count="num_experts",
            inner="moe_intermediate_size",
            is_normed="norm_topk_prob",
            leaves_some_dense=True,
        ),
    ),
    "GraniteMoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        scales=GRANITE_SCALES,
        mixture=Mixture(
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
        mixture=Mixture(
            count="num_local_experts",
            inner="intermediate_size",
            is_normed=True,
            names=ExpertNames(
                router="router",
                gate_up=("experts.gate_up_proj",),
                down="experts.down_proj",
                are_one=True,
                are_bare=True,
            ),
        ),
        unserved={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
}

_BASES = {"Gemma3ForCausalLM": "Gemma3TextModel"}
DECODER_BY_BASE = {_BASES.get(name, f"{name.removesuffix('ForCausalLM')}Model"): name for name in FAMILIES}
"""Architectures of the same decoders without an output matrix, as embedding models are saved."""
