"""A decoder run once and recorded, then replayed at every step over the same buffers."""

from __future__ import annotations

import torch

from engine.cpu.native_backend import NativeBackend
from engine.decoder.decoder import Decoder, DecoderBatch, StepOutput
from engine.kv_cache import KvCache
from engine.runner import PausedStep
from kernels.add_rms_norm.reference import add_rms_norm


class RecordedModel:
    """An `engine.runner.StepModel`.

    Args:
        decoder: uses `backend`.
        whole: the full buffers; every later batch is a prefix of them.
        cache: the only one that it will write.
    """

    def __init__(self, decoder: Decoder, backend: NativeBackend, whole: DecoderBatch, cache: KvCache) -> None:
        self._backend = backend
        # The same memory: writing it through torch every step would take longer than some of the ops.
        self._counts = backend.counts.numpy()
        self._whole = whole
        self._cache = cache
        backend.begin(whole)
        self._decoder = decoder
        self._x, self._delta = decoder.residual(whole, cache, backend.adapters)
        self._logits = decoder.logits(self._x, self._delta, whole.sampled, backend.adapters)
        self.pause_wish = backend.program.pause_flag

    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput | PausedStep:
        """Replay the recording; it pauses between sub-layers if `pause_wish` is set."""
        # The recording reads these buffers and no others.
        assert cache is self._cache
        assert batch.token_ids.data_ptr() == self._whole.token_ids.data_ptr()
        self.enter(batch)
        return self.run(batch, 0)

    def enter(self, batch: DecoderBatch) -> None:
        """Set the step's sizes and adapters."""
        self._counts[:3] = len(batch.token_ids), len(batch.attention[0].rows), len(batch.sampled)
        self._counts[7] = len(batch.token_ids) * self._backend.num_chosen
        self._backend.adapters.fill(batch.adapters, batch.sample_adapters)

    def run(self, batch: DecoderBatch, start: int) -> StepOutput | PausedStep:
        """Run the ops from index `start` on."""
        stop = self._backend.program.run(start)
        if stop < len(self._backend.program):
            return _Paused(self, batch, stop)
        logits = self._logits[: len(batch.sampled)]
        if not batch.pooled:
            return StepOutput(logits)
        # Not recorded: few steps need hidden states, and the others should not pay for them.
        return StepOutput(logits, self._decoder.hidden(self._x, self._delta, batch, add_rms_norm))

    def carried(self, batch: DecoderBatch) -> list[torch.Tensor]:
        """Return the tensors that ops before a pause leave to those after it."""
        return [tensor[: len(batch.token_ids)] for tensor in self._backend.carried.values()]


class _Paused:
    """An `engine.runner.PausedStep`."""

    def __init__(self, model: RecordedModel, batch: DecoderBatch, at: int) -> None:
        self._model = model
        self._batch = batch
        self._at = at
        self._kept: list[torch.Tensor] | None = None

    def put_aside(self) -> None:
        """Copy the tensors that the next step will overwrite."""
        self._kept = [tensor.clone() for tensor in self._model.carried(self._batch)]

    def go_on(self) -> StepOutput | PausedStep:
        """Replay the rest, after restoring the tensors if the step was put aside."""
        if self._kept is not None:
            self._model.enter(self._batch)
            for tensor, kept in zip(self._model.carried(self._batch), self._kept, strict=True):
                tensor.copy_(kept)
            self._kept = None
        return self._model.run(self._batch, self._at)
