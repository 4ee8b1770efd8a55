"""Write checkpoints of well-known model geometries with random weights, for benchmarks without a download.

The files have Hugging Face's layout (config.json, safetensors shards with their index). Weights are drawn from a normal
distribution, so that matrix products cost as much as on real data. The models answer nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHARD_BYTES = 2 << 30
WEIGHT_STD = 0.02
MXFP4_EXPONENT = 120
"""Random 4-bit values have a standard deviation of 2.8: 0.022 with this exponent."""

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}

CONFIG_BY_NAME: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # The sizes of Qwen3-0.6B in an architecture that transformers computes.
    "seed-oss-0.6b": {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": False,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "moe-2b-a0.2b": _QWEN3_MOE
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32768,
    },
}
"""Config of each named geometry, as published; the last is not a published model and fits small machines."""


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a checkpoint, in the order of the layers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    has_bias = config["model_type"] in ("qwen2", "gpt_oss")
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (size, hidden)
            if has_bias:
                yield f"{prefix}self_attn.{name}_proj.bias", (size,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q)
        if config["model_type"] == "gpt_oss":
            yield from _gpt_oss_shapes(config, prefix)
            continue
        if config["model_type"].startswith("qwen3"):
            yield f"{prefix}self_attn.q_norm.weight", (head,)
            yield f"{prefix}self_attn.k_norm.weight", (head,)
        parents, width = ["mlp"], inner
        if experts := config.get("num_experts"):
            yield f"{prefix}mlp.gate.weight", (experts, hidden)
            parents, width = [f"mlp.experts.{expert}" for expert in range(experts)], config["moe_intermediate_size"]
        for parent in parents:
            yield f"{prefix}{parent}.gate_proj.weight", (width, hidden)
            yield f"{prefix}{parent}.up_proj.weight", (width, hidden)
            yield f"{prefix}{parent}.down_proj.weight", (hidden, width)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _gpt_oss_shapes(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a gpt-oss layer other than the q, k, v and o projection weights and q, k, v biases."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield f"{prefix}self_attn.o_proj.bias", (hidden,)
    yield f"{prefix}self_attn.sinks", (config["num_attention_heads"],)
    yield f"{prefix}mlp.router.weight", (experts, hidden)
    yield f"{prefix}mlp.router.bias", (experts,)
    for name, out, depth in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield f"{prefix}mlp.experts.{name}_blocks", (experts, out, depth // 32, 16)
        yield f"{prefix}mlp.experts.{name}_scales", (experts, out, depth // 32)
        yield f"{prefix}mlp.experts.{name}_bias", (experts, out)
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)


def write_checkpoint(config: dict[str, Any], folder: Path, *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint of this configuration in bfloat16, holding at most one shard in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2} | config
    (folder / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    file_by_tensor: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    num_shards = total_bytes = held_bytes = 0

    def write_shard() -> None:
        nonlocal num_shards, held_bytes
        num_shards += 1
        file = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_by_tensor.update(dict.fromkeys(shard, file))
        shard.clear()
        held_bytes = 0

    for name, shape in tensor_shapes(whole):
        shard[name] = _random_tensor(name, shape, generator)
        size = shard[name].nbytes
        held_bytes += size
        total_bytes += size
        if held_bytes >= shard_bytes:
            write_shard()
    if shard:
        write_shard()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_by_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name.endswith("_scales"):
        return torch.full(shape, MXFP4_EXPONENT, dtype=torch.uint8)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD, generator=generator)
