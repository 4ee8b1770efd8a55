"""A decoder run once and recorded, then replayed at every step over the same buffers."""

from __future__ import annotations

from engine.backend import KvCache
from engine.cpu.native_backend import NativeBackend
from engine.decoder.decoder import Decoder, DecoderBatch, StepOutput
from kernels.add_rms_norm.reference import add_rms_norm


class RecordedModel:
    """An `engine.runner.StepModel`.

    Args:
        decoder: with `backend` as its backend.
        whole: the buffers of which every later batch is the beginning.
        cache: the only one that it will write.
    """

    def __init__(self, decoder: Decoder, backend: NativeBackend, whole: DecoderBatch, cache: KvCache) -> None:
        self._backend = backend
        # The same numbers, which are written every step; by torch that takes longer than some of the ops.
        self._counts = backend.counts.numpy()
        self._whole = whole
        self._cache = cache
        backend.begin(whole)
        self._decoder = decoder
        self._x, self._delta = decoder.residual(whole, cache, backend.adapters)
        self._logits = decoder.logits(self._x, self._delta, whole.sampled, backend.adapters)

    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput:
        """Replay."""
        # What was recorded reads these buffers and no others.
        assert cache is self._cache
        assert batch.token_ids.data_ptr() == self._whole.token_ids.data_ptr()
        num_samples = len(batch.sampled)
        self._counts[:3] = len(batch.token_ids), len(batch.attention.rows), num_samples
        self._backend.adapters.fill(batch.adapters, batch.sample_adapters)
        self._backend.program.run()
        logits = self._logits[:num_samples]
        if not batch.pooled:
            return StepOutput(logits)
        # Few steps want hidden states: not recorded, they cost the others nothing.
        return StepOutput(logits, self._decoder.hidden(self._x, self._delta, batch, add_rms_norm))
