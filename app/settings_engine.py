"""How the engine of one model runs: the `engine` of a model in the `args`, every default and its unit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.settings_node import FolderPath, SettingsNode


class EngineSettings(SettingsNode):
    """The engine of one base model; the fields are those of `engine.config.EngineConfig`."""

    device: Literal["cpu", "cuda"] | None = Field(default=None, description="Where the model runs; null: the CPU.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Precision of the weights; null: bfloat16 where the device multiplies it fast, else float32.",
    )
    quantization: Literal["int8", "fp8", "int4"] | None = Field(
        default=None,
        description="Weights of one byte, inputs rounded as they come: int8 on a CPU, fp8 on a GPU that multiplies it; "
        "int4: weights of 4 bits, inputs as they are; null: as `dtype` or the checkpoint says.",
    )
    kv_cache_dtype: Literal["int8", "fp8"] | None = Field(
        default=None, description="KV cache of one byte a number (GPU only; fp8 is e4m3); null: as `dtype` says."
    )
    num_threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of tensor operators; null: those it may use."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Context length in tokens; null: the checkpoint's."
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=2**14, description="Requests that run at once; on a CPU newcomers may be a sixteenth more."
    )
    max_batched_tokens: int = Field(
        default=1024, ge=1, le=2**20, description="Token budget of one step, prefill and decode together."
    )
    max_prefill_tokens_with_decodes: int | None = Field(
        default=None, ge=1, description="Prompt tokens of a step that others decode in; null: the whole budget."
    )
    max_decode_gap_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a step with streams may take over a prompt; null: 0.2 on a CPU, else no bound.",
    )
    block_tokens: int = Field(default=16, ge=1, description="Tokens in one block of the KV cache.")
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, description="Bytes of the KV cache; null: a share of free memory."
    )
    state_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes for states at the ends of prefixes, where a model's layers keep such; null: half as many as "
        "of the KV cache.",
    )
    kv_host_bytes: int = Field(
        default=0, ge=0, description="Bytes of host memory for blocks that a GPU's cache has no room for; 0: none."
    )
    kv_disk_bytes: int = Field(
        default=0, ge=0, description="Bytes on disk for them, of each replica; they outlive a restart. 0: none."
    )
    kv_disk_folder: FolderPath | None = Field(
        default=None, description="Folder of those; null: one of the user's cache (`XDG_CACHE_HOME`)."
    )
    gpu_memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Share of the GPU's memory this engine may use."
    )
    enable_prefix_cache: bool = Field(
        default=True, description="Whether equal prefixes of prompts share their KV blocks."
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="Tokens of a draft at most, looked up in the request's own text and prediction; 0: no drafts; "
        "null: 16 on a CPU, 0 on a GPU.",
    )
    max_queued_requests: int = Field(
        default=512, ge=0, description="Waiting requests beyond which new ones are refused."
    )
    max_queue_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds of waiting that a new request may be foretold, else it is refused; null: a quarter "
        "of `slo.ttft_s`, where that is set, else 30.",
    )
    max_adapter_rank: int = Field(default=128, ge=1, le=2**13, description="Highest LoRA rank that is loaded.")
    max_device_adapters: int | None = Field(default=None, ge=1, description="Adapters on the device; null: any number.")
    max_device_adapter_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Their bytes; null: on a GPU 1/32 of what the engine may use, else those on the host.",
    )
    max_lent_cache_share: float = Field(
        default=0.25, ge=0, le=1, description="Share of a GPU's KV cache that adapters may borrow beyond that."
    )
    max_host_adapter_bytes: int | None = Field(
        default=None, ge=1, description="Their bytes on the host; null: a quarter of what is free, 32 GiB at most."
    )
