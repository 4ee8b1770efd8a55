"""All GPU kernel launches that starts of the server make, for the geometries of commonly served models.

A start launches whatever serving will (`engine.gpu.rehearsal`). Here one is made without a GPU, of one layer of each
kind that a model has, on tensors without data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.adapter_tables import entries_of, num_experts_of
from engine.config import ResolvedConfig
from engine.decoder.decoder import Decoder
from engine.decoder.layer_forms import FULL, SLIDING
from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.choosing import TokenChooser
from engine.gpu.rehearsal import Rehearsal
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import stream_each
from engine.loading.int4 import Int4Weight
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight
from kernels.architecture import fp8_dtype, has_fp8_products, pretending
from kernels.experts.routing import sort_by_expert
from kernels.recording import Launch, recording
from kernels.streamed_linear.layout import GROUP, SHORT_GROUPS
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.engine import random_weights
from loadtest.gpu.state_launches import empty, keep_states

META = torch.device("meta")
CONFIG = ResolvedConfig(
    model_path="",
    device="cuda",
    dtype="bfloat16",
    num_threads=1,
    max_model_len=4112,
    max_num_seqs=64,
    max_batched_tokens=2048,
    block_tokens=16,
    num_blocks=1,
    enable_prefix_cache=True,
    max_queued_requests=1,
    max_adapter_rank=64,
    max_host_adapter_bytes=0,
)
MANY_ROWS = 1024
"""More single-token rows than usual, for which attention is tiled in another way."""
Config = dict[str, Any]
"""What a config.json says."""
_BOTH: Config = {"num_hidden_layers": 2, "layer_types": [FULL, SLIDING], "sliding_window": 4096}
_GELU: Config = {"hidden_act": "gelu_pytorch_tanh"}


def _named(name: str, **fields: object) -> Config:
    return CONFIG_BY_NAME[name] | {"num_hidden_layers": 1, "eos_token_id": 2, "quantization_config": None} | fields


def _like(family: str, hidden: int, inner: int, **fields: object) -> Config:
    """Return Llama-3.1-8B with these widths, of another family."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner}
    plain = {"head_dim": 128, "rope_scaling": None, "sliding_window": None, "norm_topk_prob": True}
    return _named("llama-3.1-8b", architectures=[f"{family}ForCausalLM"], **sizes, **plain) | fields


def _heads(heads: int, kv_heads: int, head_dim: int) -> Config:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _experts(count: int, chosen: int) -> Config:
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": chosen}


LLAMA = _named("llama-3.1-8b")
QWEN_3 = _named("qwen3-0.6b")
QWEN_2_5 = _named("qwen2.5-0.5b", use_sliding_window=True, **_BOTH)
MISTRAL = _like("Mistral", 4096, 14336, **_BOTH)
GPT_OSS = _named("gpt-oss-20b", num_hidden_layers=2)
"""Not quantized, nor is the larger one below."""
WIDEST_HEADS = MISTRAL | _heads(16, 2, 512)
CACHED: tuple[Config, ...] = (
    MISTRAL,
    QWEN_3,
    QWEN_2_5,
    # gpt-oss-120b
    GPT_OSS | _experts(128, 4),
    # Gemma 2 and 3
    _like("Gemma2", 2304, 9216, **_BOTH, **_GELU, **_heads(8, 4, 256)),
    _like("Gemma3", 1152, 6912, **_BOTH | {"sliding_window": 512}, **_GELU, **_heads(4, 1, 256)),
    # Heads of 128, as in Gemma-2-27B
    _like("Gemma2", 4096, 14336, **_BOTH, **_GELU),
    *(MISTRAL | heads for heads in (_heads(32, 32, 80), _heads(32, 32, 96))),
    # Gemma 1
    LLAMA | _heads(8, 1, 256),
    # As Gemma 4 has in layers without a window.
    WIDEST_HEADS,
    LLAMA | _heads(8, 2, 512),
)
"""Those that are launched with every format of the KV cache."""
QWEN_3_MOE = _named("qwen3-30b-a3b")
MIXTRAL = _like("Mixtral", 4096, 14336, **_experts(8, 2))
OTHERS = (
    # A vocabulary that is no multiple of 16, as GPT-2's
    _named("qwen3-0.6b", vocab_size=50257),
    _like("Phi3", 3072, 8192, **_heads(24, 8, 128), partial_rotary_factor=0.75),
    MIXTRAL,
    GPT_OSS,
    _like("Qwen2Moe", 2048, 1408, **_experts(60, 4), shared_expert_intermediate_size=5632),
    # Gemma 4
    _like("Qwen3Moe", 2816, 704, **_experts(128, 8), **_GELU),
    # The most experts
    _like("Qwen3Moe", 2048, 512, **_experts(512, 16)),
)
LARGER_QWEN_2_5 = _like("Qwen2", 3584, 18944, **_heads(28, 4, 128))
WIDEST = _like("Llama", 8192, 28672, **_heads(64, 8, 128))
"""Llama-3.1-70B: the quantization of the widest rows has least room, and none wider fit on one GPU."""
FEW_EXPERTS = QWEN_3_MOE | _experts(16, 8)
"""Laying out weights of 4 bits takes a while for each."""
MXFP4 = GPT_OSS | _experts(16, 4) | {"quantization_config": {"quant_method": "mxfp4"}}


def all_launches(target: str) -> list[Launch]:
    """Return each kernel specialization for a GPU once: all in bfloat16, some also in float16 and float32."""
    with pretending(target), recording() as launches:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for model in (LLAMA, QWEN_3_MOE, MXFP4):
                rehearse(model, dtype)
        rehearse(WIDEST_HEADS, torch.float32)
        for model in OTHERS:
            rehearse(model)
        for held in filter(None, (torch.bfloat16, torch.int8, fp8_dtype())):
            rehearse(LLAMA, held=held, max_num_seqs=MANY_ROWS)
            for model in CACHED:
                rehearse(model, held=held, max_batched_tokens=2 * CONFIG.max_num_seqs)
        if has_fp8_products():
            for model in (LLAMA, QWEN_3, LARGER_QWEN_2_5, WIDEST, QWEN_3_MOE, MIXTRAL):
                rehearse(model, quantization="fp8")
        for group in (GROUP, *SHORT_GROUPS):
            for model in (LLAMA, FEW_EXPERTS):
                rehearse(model, quantization="int4", group=group)
        for model, dtype in ((LARGER_QWEN_2_5, torch.bfloat16), (LLAMA, torch.float16)):
            rehearse(model, dtype, quantization="int4")
        keep_states()
        for experts, chosen in ((128, 8), (8, 2), (60, 4), (512, 16)):
            _sort_by_expert(experts, chosen)
    return launches


def _sort_by_expert(experts: int, chosen: int) -> None:
    """Launch what modules of transformers need beside that."""
    names, weights = empty(64, chosen, dtype=torch.int32), empty(64, chosen, dtype=torch.float32)
    counts, decodes = empty(experts + 1, dtype=torch.int32), empty(64, 4, dtype=torch.int64)
    sort_by_expert(names, weights, counts, tile=16, decodes=decodes)


class _NoDevice(CudaRuntime):
    """Services of a GPU on whose tensors there is no data."""

    def __init__(self) -> None:
        self.device = META

    def staging(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def fence(self) -> Callable[[], None]:
        return lambda: None

    @contextmanager
    def beside(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


def rehearse(
    model: Config,
    dtype: torch.dtype = torch.bfloat16,
    *,
    quantization: str | None = None,
    group: int = GROUP,
    held: torch.dtype | None = None,
    **changes: Any,
) -> None:
    """Launch what a start launches: weights quantized, 4-bit ones in groups, and a cache of dtype `held`, or `dtype`.

    `changes` are to `CONFIG`.
    """
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        spec = read_spec(folder)
    runtime, config = _NoDevice(), replace(CONFIG, **changes)
    sizes = config.max_num_seqs, config.max_adapter_rank, config.max_batched_tokens
    lora = TritonLora(runtime, *sizes, is_mixture=num_experts_of(spec) > 0, entries=entries_of(spec))
    backend = TritonBackend(lora, config.max_num_seqs, quantization)
    weights = _weights(spec, dtype, group if quantization == "int4" else None)
    decoder = Decoder(spec, weights, backend, config.max_model_len)
    choose = TokenChooser(runtime, config.max_num_seqs, spec.vocab_size)
    stream_each(backend.linears)
    Rehearsal(decoder, lora, choose, config, held or dtype, META).run()


def _weights(spec: DecoderSpec, dtype: torch.dtype, group: int | None) -> Iterator[tuple[str, Weight]]:
    for name, weight in random_weights("", spec, dtype, META):
        if isinstance(weight, Mxfp4Weight):
            # These are looked at.
            yield name, replace(weight, exponents=torch.zeros(weight.exponents.shape, dtype=torch.uint8))
        elif group and name.startswith("layers.") and not name.endswith(("router", "norm", "bias")):
            assert isinstance(weight, torch.Tensor)
            yield name, _int4(weight, group)
        else:
            yield name, weight


def _int4(weight: torch.Tensor, group: int) -> Int4Weight:
    scales = empty(weight.shape[1] // group, weight.shape[0], dtype=weight.dtype)
    return Int4Weight(levels=weight.to(torch.uint8), scales=scales, zeros=scales.int(), dtype=weight.dtype)
