"""The decoder on a GPU: steps with one token per row are recorded once and replayed, all others are launched.

A replay (CUDA graph) is one call, where a decode step of a large model takes hundreds of kernel launches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.decoder.decoder import Decoder, DecoderBatch, StepOutput
from engine.fallback.decoder import FallbackDecoder
from engine.gpu.adapters import AdapterScope
from engine.gpu.backend import TritonBackend
from engine.gpu.inputs import DeviceInputs
from engine.gpu.progress import Progress
from engine.gpu.runtime import CudaRuntime
from engine.kv_cache import KvCache

_logger = logging.getLogger(__name__)


def recorded_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to record: 1, 2, 4, multiples of 8, from 64 on only of 16, and `max_rows`."""
    sizes = {1, 2, 4, *range(8, min(64, max_rows), 8), *range(64, max_rows, 16), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class GpuModel:
    """An `engine.runner.StepModel`.

    Args:
        decoder: uses `backend`.
        inputs: the source of every batch.
    """

    def __init__(self, decoder: Decoder | FallbackDecoder, backend: TritonBackend, inputs: DeviceInputs) -> None:
        self._decoder = decoder
        self._backend = backend
        self._inputs = inputs
        self._recorded: dict[tuple[int, AdapterScope, bool], tuple[Callable[[], None], torch.Tensor]] = {}

    @torch.inference_mode()
    def record(self, cache: KvCache, sizes: Sequence[int], runtime: CudaRuntime) -> int:
        """Record a decode step of each size and kind of adapters, the largest first: all share its memory.

        Returns:
            The device memory in bytes that the recordings take.
        """
        started_s, taken_before = time.monotonic(), runtime.taken_bytes()
        progress = Progress("recording decode steps")
        for number, size in enumerate(sorted(sizes, reverse=True), start=1):
            for scope, has_experts in self._kinds():
                batch = self._inputs.padding(size)
                self._backend.adapters.expect(size, scope, has_experts=has_experts)
                self._recorded[size, scope, has_experts] = runtime.record(partial(self._logits, batch, cache))
            progress.reach(number, len(sizes))
        self._backend.adapters.expect(0)
        taken, took_s = runtime.taken_bytes() - taken_before, time.monotonic() - started_s
        _logger.info("recorded %d steps in %.1f s; they take %.2f GiB", len(self._recorded), took_s, taken / 2**30)
        return taken

    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput:
        """Replay or launch. A step with hidden states to return is launched, as one of its rows draws no token."""
        self._backend.adapters.fill(batch.adapters, batch.sample_adapters)
        recorded = None
        num_tokens = len(batch.token_ids)
        if batch.attention[0].num_decodes == num_tokens == len(batch.sampled):
            adapters = self._backend.adapters
            recorded = self._recorded.get((num_tokens, adapters.scope, adapters.has_experts))
        if recorded is None:
            if self._inputs.has_pending:
                self._inputs.put_drawn(batch)
            output = self._decoder.forward(batch, cache)
            return output._replace(logits=output.logits[: self._inputs.num_samples])
        replay, logits = recorded
        moves = batch.state_moves
        if moves is None:
            replay()
        else:
            # Their rows differ from step to step, so they are copied around the recorded part.
            assert isinstance(self._decoder, FallbackDecoder)
            self._decoder.begin(moves)
            replay()
            self._decoder.end(moves)
        return StepOutput(logits[: self._inputs.num_samples])

    def _kinds(self) -> list[tuple[AdapterScope, bool]]:
        """Return the combinations to record: the scope of a step's adapters, and whether they change experts."""
        may_have = (False, True) if self._backend.adapters.is_mixture else (False,)
        # Modules of transformers take adapters in linear products only.
        scopes = [
            scope for scope in AdapterScope if scope < AdapterScope.WHOLE_MODEL or isinstance(self._decoder, Decoder)
        ]
        return [(scope, has) for scope in scopes for has in may_have if scope > AdapterScope.NOTHING or not has]

    def _logits(self, batch: DecoderBatch, cache: KvCache) -> torch.Tensor:
        self._inputs.put_drawn(batch)
        logits, room = self._decoder.forward(batch, cache).logits, self._backend.logits
        if room is None or logits.data_ptr() == room.data_ptr():
            return logits
        # Modules of transformers may scale logits into new memory, which each recording would keep for itself.
        return room[: len(logits)].copy_(logits)
