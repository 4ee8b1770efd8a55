"""Engine configuration: what a person may set (`EngineConfig`), and what follows from it (`ResolvedConfig`).

"auto" is spelled None. `resolve` is pure: it turns None into numbers from the model's geometry and the machine, and
refuses options that exclude each other, naming both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cache.reach import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a person sets for one base model. Every field has a unit in its name or counts something.

    Attributes:
        model_path: folder in Hugging Face layout (config.json, safetensors, tokenizer).
        tokenizer_path: folder with the tokenizer.json by which grammars are followed; None for the model's own.
        device: "cpu", "cuda", or None for the CPU.
        dtype: "float32", "bfloat16", "float16" or None: bfloat16 where the device multiplies it fast, else float32.
        quantization: "int8" (our own CPU kernels) or "fp8" (e4m3, GPUs of compute capability 9.0 and above) for linear
            layers of one byte a weight, inputs rounded as they come; "int4" for weights of 4 bits, up to 128 inputs to
            a scale, inputs as they are; None for `dtype`, and for a checkpoint that has weights of 4 bits, or on a GPU
            of 8, for what keeps them; a GPU keeps experts in MXFP4 always. Embedding, output matrix and adapters stay
            in `dtype`.
        kv_cache_dtype: "int8" or "fp8" (e4m3) for a KV cache of one byte a number, on a GPU; None for `dtype`.
        num_threads: CPU threads of tensor operators; None takes all the cores this process may use.
        max_model_len: context length in tokens; None takes the checkpoint's.
        max_num_seqs: requests that run at once.
        max_batched_tokens: token budget of a step (prefill chunks and decodes together).
        block_tokens: tokens in a block of the KV cache.
        kv_cache_bytes: size of the KV cache; None: on a CPU a share of free memory, on a GPU what
            `gpu_memory_fraction` leaves.
        state_cache_bytes: room for what layers that keep states had at the ends of prefixes; None: half as much as the
            KV cache, 0: none is kept, and none found.
        kv_host_bytes: memory of a GPU's host for blocks that its cache has no room for; 0 for none.
        kv_disk_bytes: room on disk for those; what lies there is found again after a restart. 0 for none.
        kv_disk_folder: where; None for a folder of the user's cache (XDG_CACHE_HOME).
        gpu_memory_fraction: share of the device's memory this engine may use.
        max_prefill_tokens_with_decodes: bound on the prefill tokens of a step that also decodes, so that a long prompt
            does not stall running streams; None for the whole budget.
        max_decode_gap_s: how long a step may take that computes a prompt beside running streams; how many tokens that
            makes is measured. None: 0.2 on a CPU, no bound on a GPU.
        enable_prefix_cache: share full blocks between requests with equal prefixes.
        num_speculative_tokens: tokens of a draft at most, of what an answer is guessed to go on with; 0 for no drafts.
            None: 16 on a CPU, 0 on a GPU, where each step then waits for the one before.
        max_queued_requests: waiting requests beyond which new ones are refused with `OverloadError`.
        max_queue_s: longest wait for its turn that a new request may be foretold; beyond it is refused with
            `OverloadError`.
        max_adapter_rank: adapters of a higher rank are refused at load.
        max_device_adapters: adapters resident on the device at once; None for as many as its bytes hold.
        max_device_adapter_bytes: memory of those together, each with its own rank and modules. None: on a GPU a share
            of what this engine may use, on a CPU, where it is the host's, as much as the host keeps.
        max_lent_cache_share: share of a GPU's KV cache that adapters may borrow beyond that while no request needs
            it.
        max_host_adapter_bytes: memory of the adapters kept on the host, least recently used out first. None: a share of
            what is free.
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
    max_queued_requests: int = 512
    max_queue_s: float = math.inf
    max_adapter_rank: int = 128
    max_device_adapters: int | None = None
    max_device_adapter_bytes: int | None = None
    max_lent_cache_share: float = 0.25
    max_host_adapter_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every None answered; printed at start and never changed afterwards.

    Attributes:
        num_blocks: blocks in the KV cache; together they hold at least one request of `max_model_len`.
        windows: of each block table, see `engine.cache.layout.CacheLayout`.
        max_blocks_per_request: length of a full block table.
        num_snapshots: states that are kept at the ends of prefixes; 0 where none is to be found, or layers have none.
        num_guest_rows: so many requests more than `max_num_seqs` run where newcomers find every row taken.
        lent_run_blocks: neighbouring blocks that are lent to adapters at once; 0 where none are.
        max_lent_blocks: blocks that may be lent together; what is left holds a request of `max_model_len`.
        vocab_size: token ids that the model knows, 0 to vocab_size - 1; None where nobody checks them.
        generates: the model has an output matrix; else it makes vectors only.
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
    max_blocks_per_request: int
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
        """Return how far back requests hold blocks."""
        return Reach(self.windows, self.block_tokens, self.max_batched_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the runner's buffers."""
        return self.max_num_seqs + self.num_guest_rows

    @property
    def num_logits(self) -> int:
        """Positions of a step whose logits are computed, at most."""
        return self.num_rows + self.num_speculative_tokens

    def prefill_cap(self, bound: int | None) -> int:
        """Return how many prompt tokens a step may compute that also decodes; `bound` holds besides."""
        bounds = (bound, self.max_prefill_tokens_with_decodes, self.max_batched_tokens)
        return min(bound for bound in bounds if bound is not None)
