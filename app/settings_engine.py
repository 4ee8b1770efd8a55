"""Settings under a model's `engine`, with every default and its unit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.settings_node import FolderPath, SettingsNode

MAX_BYTES = 2**50
"""More than any machine has, and still an address."""


class EngineSettings(SettingsNode):
    """The engine of one base model; its fields are those of `engine.config.EngineConfig`."""

    device: Literal["cpu", "cuda"] | None = Field(default=None, description="Device; null: cpu.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Data type of the weights; null: bfloat16 if that is faster here, else float32.",
    )
    quantization: Literal["int8", "fp8", "int4"] | None = Field(
        default=None,
        description="int8 (CPU) or fp8 (GPU, compute capability 9.0 or above): 8-bit weights and activations; int4: "
        "4-bit weights, activations not quantized; null: as `dtype` or the checkpoint says.",
    )
    kv_cache_dtype: Literal["int8", "fp8"] | None = Field(
        default=None, description="8-bit KV cache (GPU only; fp8 is e4m3); null: `dtype`."
    )
    num_threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads for tensor operators; null: all available cores."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Context length in tokens; null: that of the checkpoint."
    )
    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=2**14,
        description="Maximum running requests; on a CPU, new ones may exceed it by a sixteenth.",
    )
    max_batched_tokens: int = Field(
        default=1024, ge=1, le=2**20, description="Token budget of a step, prefill and decode together."
    )
    max_prefill_tokens_with_decodes: int | None = Field(
        default=None, ge=1, description="Maximum prefill tokens of a step that also decodes; null: the whole budget."
    )
    max_decode_gap_s: float | None = Field(
        default=None,
        gt=0,
        description="Maximum seconds of a step that prefills beside running streams; null: 0.2 on a CPU, else none.",
    )
    block_tokens: int = Field(default=16, ge=1, le=2**13, description="Tokens per KV cache block.")
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, le=MAX_BYTES, description="Size of the KV cache in bytes; null: a share of free memory."
    )
    state_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        le=MAX_BYTES,
        description="Bytes for recurrent states at the ends of cached prefixes (hybrid and linear-attention models); "
        "null: up to half as many as the KV cache.",
    )
    kv_host_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_BYTES,
        description="Host memory in bytes for blocks evicted from a GPU's KV cache; 0: none.",
    )
    kv_disk_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_BYTES,
        description="Disk space in bytes per replica for evicted blocks, kept across restarts; 0: none.",
    )
    kv_disk_folder: FolderPath | None = Field(
        default=None, description="Folder for blocks on disk; null: in the user's cache (`XDG_CACHE_HOME`)."
    )
    gpu_memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Fraction of the GPU's memory that this engine may use."
    )
    enable_prefix_cache: bool = Field(default=True, description="Whether prompts with equal prefixes share KV blocks.")
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Maximum draft tokens, looked up in the request's own text and prediction, or guessed by the "
        "`draft_model`; 0: no speculative decoding; null: 16 on a CPU, 0 on a GPU and for models with recurrent "
        "states.",
    )
    draft_model: FolderPath | None = Field(
        default=None,
        description="Folder or hub id of a small model with the same tokenizer, which guesses drafts (CPU only); null: "
        "none.",
    )
    max_queued_requests: int = Field(
        default=512,
        ge=0,
        # With the running ones, Serve has 31 bits for them.
        le=2**30,
        description="Maximum waiting requests; beyond it, new ones are refused.",
    )
    max_queue_s: float | None = Field(
        default=None,
        gt=0,
        description="Maximum estimated wait of a new request in seconds; beyond it, the request is refused; null: a "
        "quarter of `slo.ttft_s` if set, else 30.",
    )
    max_adapter_rank: int = Field(default=128, ge=1, le=2**13, description="Maximum LoRA rank.")
    max_device_adapters: int | None = Field(
        default=None, ge=1, description="Maximum adapters on the device; null: no limit."
    )
    max_device_adapter_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BYTES,
        description="Maximum bytes of adapters on the device; null: 1/32 of the engine's memory on a GPU, else "
        "`max_host_adapter_bytes`.",
    )
    max_lent_cache_share: float = Field(
        default=0.25, ge=0, le=1, description="Fraction of a GPU's KV cache that adapters may borrow beyond that."
    )
    max_host_adapter_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BYTES,
        description="Maximum bytes of adapters on the host; null: a quarter of free memory, at most 32 GiB.",
    )
