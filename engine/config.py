"""Engine configuration: what a user may set (`EngineConfig`), and what follows from it (`ResolvedConfig`).

None means "auto". `resolve` is pure: it replaces None by values derived from the model's geometry and the machine, and
refuses mutually exclusive options, naming both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cache.reach import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """User settings for one base model. Every field has a unit in its name or is a count.

    Attributes:
        model_path: folder in Hugging Face layout (config.json, safetensors, tokenizer).
        tokenizer_path: folder with the tokenizer.json used for constrained decoding; None: the model's folder.
        device: "cpu" or "cuda"; None: "cpu".
        dtype: "float32", "bfloat16" or "float16"; None: bfloat16 if that is faster here, else float32.
        quantization: "int8" (our own CPU kernels) or "fp8" (e4m3, GPUs of compute capability 9.0 and above): weights
            and activations of linear layers are quantized to one byte. "int4": weights are quantized to 4 bits, with up
            to 128 inputs per scale; activations are not. None: `dtype`, or the format of the checkpoint, if its weights
            have 4 bits, or 8 bits on a GPU, and can stay as stored. On a GPU, MXFP4 experts always stay in MXFP4.
            Adapters stay in `dtype`, and on a GPU embedding and output matrix; on a CPU the output matrix, and an
            embedding that is tied to it, have 8 bits with any quantization.
        kv_cache_dtype: "int8" or "fp8" (e4m3) for a KV cache of one byte per element, on a GPU only; None: `dtype`.
        num_threads: CPU threads for tensor operators; None: all cores available to this process.
        max_model_len: context length in tokens; None: that of the checkpoint.
        max_num_seqs: maximum running requests.
        max_batched_tokens: token budget of a step (prefill chunks and decodes together).
        block_tokens: tokens per KV cache block.
        kv_cache_bytes: size of the KV cache; None: a share of free memory on a CPU, what `gpu_memory_fraction` leaves
            on a GPU.
        state_cache_bytes: memory for recurrent states at the ends of cached prefixes; None: up to half that of the KV
            cache. 0: none are kept, and models with such states find no prefix.
        kv_host_bytes: host memory for blocks evicted from a GPU's KV cache; 0: none.
        kv_disk_bytes: disk space for evicted blocks, which can be reused after a restart; 0: none.
        kv_disk_folder: folder of those blocks; None: one in the user's cache (XDG_CACHE_HOME).
        gpu_memory_fraction: fraction of the device's memory that this engine may use.
        max_prefill_tokens_with_decodes: maximum prefill tokens of a step that also decodes, so that a long prompt does
            not stall running streams; None: the whole budget.
        max_decode_gap_s: maximum duration of a step that prefills beside running streams; the number of tokens that
            fit is measured. None: 0.2 on a CPU, no bound on a GPU.
        enable_prefix_cache: requests with equal prefixes share full blocks.
        num_speculative_tokens: maximum length of a draft in tokens; 0: no speculative decoding. None: 16 on a CPU, 0 on
            a GPU, where drafts make each step wait for the previous one, and for models with recurrent states.
        draft_model: folder of a small model with the same tokenizer, which guesses how answers go on; on a CPU only.
            None: drafts are only looked up in the request's own text and prediction.
        max_queued_requests: maximum waiting requests; beyond it, new ones are refused with `OverloadError`.
        max_queue_s: maximum estimated wait of a new request; beyond it, the request is refused with `OverloadError`.
        max_adapter_rank: adapters of higher rank are refused at load.
        max_device_adapters: maximum adapters on the device; None: limited by bytes only.
        max_device_adapter_bytes: total memory of adapters on the device, each with its own rank and modules. None: a
            share of the engine's memory on a GPU, `max_host_adapter_bytes` on a CPU, where both are the same memory.
        max_lent_cache_share: fraction of a GPU's KV cache that adapters may borrow beyond that while no request needs
            it.
        max_host_adapter_bytes: memory for adapters on the host, evicted least recently used first. None: a share of
            free memory.
    """

    model_path: str
    tokenizer_path: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 1024
    block_tokens: int = 16
    kv_cache_bytes: int | None = None
    state_cache_bytes: int | None = None
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_folder: str | None = None
    gpu_memory_fraction: float = 0.9
    max_prefill_tokens_with_decodes: int | None = None
    max_decode_gap_s: float | None = None
    enable_prefix_cache: bool = True
    num_speculative_tokens: int | None = None
    draft_model: str | None = None
    max_queued_requests: int = 512
    max_queue_s: float = math.inf
    max_adapter_rank: int = 128
    max_device_adapters: int | None = None
    max_device_adapter_bytes: int | None = None
    max_lent_cache_share: float = 0.25
    max_host_adapter_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every None resolved; printed at startup and constant from then on.

    Attributes:
        num_blocks: blocks in the KV cache; they hold at least one request of `max_model_len`.
        windows: attention window of each block table, see `engine.cache.layout.CacheLayout`.
        num_snapshots: recurrent states kept at the ends of prefixes; 0 if disabled or the model has none.
        num_guest_rows: requests that may run beyond `max_num_seqs` if new ones find every row taken.
        lent_run_blocks: adjacent blocks lent to adapters at a time; 0 if none are lent.
        max_lent_blocks: maximum blocks lent at once; the rest hold a request of `max_model_len`.
        vocab_size: number of valid token ids, 0 to vocab_size - 1; None: token ids are not checked.
        generates: the model has an output matrix; otherwise it only computes embeddings.
    """

    model_path: str
    device: str
    dtype: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    block_tokens: int
    num_blocks: int
    enable_prefix_cache: bool
    max_queued_requests: int
    max_adapter_rank: int
    max_host_adapter_bytes: int
    num_guest_rows: int = 0
    num_snapshots: int = 0
    num_speculative_tokens: int = 0
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_folder: str | None = None
    max_prefill_tokens_with_decodes: int | None = None
    max_decode_gap_s: float | None = None
    max_queue_s: float = math.inf
    max_device_adapters: int | None = None
    max_device_adapter_bytes: int = 8 << 30
    lent_run_blocks: int = 0
    max_lent_blocks: int = 0
    vocab_size: int | None = None
    generates: bool = True
    windows: tuple[int, ...] = (0,)

    @property
    def reach(self) -> Reach:
        """Return how far back requests keep blocks."""
        return Reach(self.windows, self.block_tokens, self.max_batched_tokens)

    @property
    def max_blocks_per_request(self) -> int:
        """Length of a full block table."""
        return self.reach.num_blocks(self.max_model_len)

    @property
    def num_rows(self) -> int:
        """Rows of the runner's buffers."""
        return self.max_num_seqs + self.num_guest_rows

    @property
    def num_logits(self) -> int:
        """Maximum positions per step whose logits are computed."""
        return self.num_rows + self.num_speculative_tokens
