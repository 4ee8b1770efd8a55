"""Executes step plans on one device: owns the weights, the KV cache and the sampling state."""

from __future__ import annotations

import time
from collections import deque

import torch

from engine.backend import KvCache
from engine.buffers import InputBuffers
from engine.config import ResolvedConfig
from engine.decoder.decoder import Decoder, DecoderBatch
from engine.lora import LoraBatch, ResidentAdapters
from engine.metrics import StepTimes
from engine.sampling.sampler import Sampler
from engine.step import StepPlan, StepResult


class Runner:
    """An `engine.ports.StepRunner` on the CPU: a submitted plan is computed at once, and collected afterwards."""

    def __init__(
        self, config: ResolvedConfig, decoder: Decoder, cache: KvCache, sampler: Sampler, adapters: ResidentAdapters
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._adapters = adapters
        self._buffers = InputBuffers(config, cache.null_block)
        self._results: deque[StepResult] = deque()
        self._times = StepTimes()

    @property
    def times(self) -> StepTimes:
        """Return the seconds spent in each part so far."""
        return self._times

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Compute one plan."""
        started = time.monotonic()
        self._update_rows(plan)
        batch = self._batch(plan)
        self._cache.clear(self._buffers.fresh_blocks(plan))
        prepared = time.monotonic()
        logits = self._decoder.forward(batch, self._cache)
        computed = time.monotonic()
        self._results.append(self._sample(plan, logits))
        self._times.prepare_s += prepared - started
        self._times.forward_s += computed - prepared
        self._times.sample_s += time.monotonic() - computed

    def collect(self) -> StepResult:
        """Return the oldest result."""
        return self._results.popleft()

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            self._sampler.release(row)
        for step_row in plan.rows:
            if step_row.is_admission:
                self._sampler.admit(step_row.row, step_row.request, step_row.output_ids)

    def _batch(self, plan: StepPlan) -> DecoderBatch:
        token_ids, positions, attention = self._buffers.fill(plan)
        sampled, segments, at = [], [], 0
        for row in plan.rows:
            end = at + row.num_tokens
            segments.append((row.adapter, at, end))
            if row.samples:
                sampled.append(end - 1)
            at = end
        return DecoderBatch(
            token_ids=token_ids,
            positions=positions,
            sampled=torch.tensor(sampled, dtype=torch.int64),
            attention=attention,
            lora=LoraBatch.build(segments, self._adapters),
        )

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        rows = [row for row in plan.rows if row.samples]
        drawn = self._sampler.sample(logits, [row.row for row in rows], [row.end for row in rows])
        errors = {row.request.request_id: drawn.failed[row.row] for row in rows if row.row in drawn.failed}
        tokens = {
            row.request.request_id: token_id
            for row, token_id in zip(rows, drawn.token_ids, strict=True)
            if row.row not in drawn.failed
        }
        return StepResult(step_id=plan.step_id, token_id_by_request=tokens, error_by_request=errors)
