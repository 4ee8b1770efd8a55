"""Execute step plans on one device; owns the weights, the KV cache and the sampling state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from engine.buffers import InputBuffers
from engine.decoder.decoder import DecoderBatch, StepOutput
from engine.kv_cache import KvCache
from engine.lora import AdapterSegment, Segment, WeightsOf, collect_segments
from engine.metrics import StepTimes
from engine.placing import placed
from engine.pooling import Pooler, Vector, heads_of, packed, pooled_ranges
from engine.request import RequestId
from engine.sampling.draws import read_told
from engine.sampling.sampler import NOT_FINITE, Drawing, Sampler
from engine.speculation.verifying import draw_behind
from engine.step import StepPlan, StepResult, StepRow

AHEAD_TOKENS = 2048
"""While idle, the runner takes memory for this many tokens beyond the highest cache block used so far."""


class PausedStep(Protocol):
    """A partially computed step."""

    def put_aside(self) -> None:
        """Save the state that another step, about to be computed, would overwrite."""
        ...

    def go_on(self) -> StepOutput | PausedStep:
        """Compute the rest; if another step came in between, the caller has filled the input buffers again."""
        ...


class StepModel(Protocol):
    """Computes a step: a `Decoder`, or a recording of one."""

    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput | PausedStep:
        """Write the cache and return the output, or the paused step if the model supports pausing and was asked to."""
        ...


@dataclass(slots=True)
class _Begun:
    """A plan that is being computed; `heads` as in `engine.pooling.heads_of`."""

    plan: StepPlan
    batch: DecoderBatch
    heads: dict[RequestId, torch.Tensor]
    paused: PausedStep | None = None
    is_overwritten: bool = False


class Runner:
    """Executes plans in order; all calls come from the engine's thread.

    Attributes:
        steps_ahead: plans that may be in flight while another is made: 0 if the model computes synchronously; 1 if it
            enqueues work for an asynchronous device.
        times: seconds spent in each part so far, to which the engine adds those that it spends itself.
    """

    def __init__(
        self,
        buffers: InputBuffers,
        model: StepModel,
        cache: KvCache,
        sampler: Sampler,
        weights_of: WeightsOf,
        steps_ahead: int = 0,
    ) -> None:
        self._buffers = buffers
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._weights_of = weights_of
        self._pooler = Pooler(sampler.fetch)
        # More than one if a step was put aside for another.
        self._begun: list[_Begun] = []
        self._submitted: deque[_Submitted] = deque()
        self.steps_ahead = steps_ahead
        self.times = StepTimes()
        self._highest_block = 0

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Prepare a plan, putting a paused step aside.

        The caller then calls `proceed` until it is computed, or submits one that goes first.
        """
        started = time.monotonic()
        if self._begun:
            begun = self._begun[-1]
            assert begun.paused is not None, "a step that has not paused is put aside"
            begun.paused.put_aside()
            begun.is_overwritten = True
        self._update_rows(plan)
        batch = self._batch(plan)
        self._cache.clear(self._buffers.fresh_blocks(plan))
        heads = heads_of(plan, self._weights_of) if plan.has_pooled else {}
        self._begun.append(_Begun(plan, batch, heads))
        self.times.prepare_s += time.monotonic() - started

    @torch.inference_mode()
    def proceed(self) -> bool:
        """Compute the newest plan, or enqueue it behind earlier ones; return True if it has paused."""
        started = time.monotonic()
        begun = self._begun[-1]
        if begun.is_overwritten:
            self._buffers.fill(begun.plan, begun.batch.adapters)
            begun.is_overwritten = False
        paused = begun.paused
        output = self._model.forward(begun.batch, self._cache) if paused is None else paused.go_on()
        computed = time.monotonic()
        self.times.forward_s += computed - started
        if not isinstance(output, StepOutput):
            begun.paused = output
            return True
        self._begun.pop()
        self._submitted.append(self._draw(begun, output))
        self.times.sample_s += time.monotonic() - computed
        return False

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Wait for the oldest computed plan and return its result."""
        rows, lines, scores, logits, drawing, vectors = self._submitted.popleft()
        drawn = self._sampler.finish(drawing)
        found = draw_behind(self._sampler, logits, lines, rows, drawn)
        pooled = {request_id: packed(vector()) for request_id, vector in vectors.items()}
        ids = [row.request.request_id for row in rows]
        tokens = {request_id: tuple(row.token_ids) for request_id, row in zip(ids, found, strict=True)}
        by_row = dict(zip((row.row for row in rows), ids, strict=True))
        errors = {by_row[row]: error for row, error in drawn.failed.items()}
        for request_id in errors:
            del tokens[request_id]
        errors |= {request_id: NOT_FINITE for request_id, vector in pooled.items() if vector is None}
        return StepResult(
            token_ids_by_request=tokens,
            error_by_request=errors,
            unfollowable=frozenset(by_row[row] for row in drawn.unfollowable),
            logprobs_by_request={
                request_id: tuple(row.logprobs) for request_id, row in zip(ids, found, strict=True) if row.logprobs
            },
            prompt_logprobs_by_request={request_id: read_told(fetched()) for request_id, fetched in scores.items()},
            pooled_by_request={request_id: vector for request_id, vector in pooled.items() if vector is not None},
        )

    def idle(self) -> bool:
        """Take memory for the next cache blocks before a request has to wait for it; return False if none is left."""
        num_blocks = AHEAD_TOKENS // self._cache.block_tokens * len(self._cache.layout.windows)
        return self._cache.touch(self._highest_block + num_blocks)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            self._sampler.release(row)
            self._pooler.release(row)
        for step_row in plan.rows:
            if step_row.is_admission and step_row.request.pooling is None:
                self._sampler.admit(step_row.row, step_row.request, step_row.output_ids)

    def _batch(self, plan: StepPlan) -> DecoderBatch:
        self._highest_block = max(
            self._highest_block, *(blocks[-1] for row in plan.rows for blocks in row.block_tables)
        )
        adapters: tuple[AdapterSegment, ...] = ()
        if any(row.request.adapter is not None for row in plan.rows):
            adapters = collect_segments(_segments(plan.rows, [row.num_tokens for row in plan.rows]), self._weights_of)
        batch = self._buffers.fill(plan, adapters)
        if any(segment.weights.changes_whole_model for segment in adapters):
            samples = _segments(plan.rows, [row.num_logits for row in plan.rows])
            batch = replace(batch, sample_adapters=collect_segments(samples, self._weights_of))
        if plan.state_moves is not None:
            batch = replace(batch, state_moves=plan.state_moves)
        return replace(batch, pooled=pooled_ranges(plan)) if plan.has_pooled else batch

    def _draw(self, begun: _Begun, output: StepOutput) -> _Submitted:
        plan = begun.plan
        rows = [row for row in plan.rows if row.samples]
        scores, lines = self._scored(plan, output.logits)
        # The sampler may overwrite its input, so that rows needed later are copied.
        are_all = len(lines) == len(output.logits)
        first = output.logits if are_all else output.logits[placed(lines, output.logits.device)]
        drawing = self._sampler.draw(first, [row.row for row in rows], [row.end for row in rows])
        self._buffers.keep(drawing.token_ids)
        vectors = self._pooler.add(plan, output.hidden, begun.heads) if plan.has_pooled else {}
        return _Submitted(rows, lines, scores, output.logits, drawing, vectors)

    def _scored(
        self, plan: StepPlan, logits: torch.Tensor
    ) -> tuple[dict[RequestId, Callable[[], torch.Tensor]], list[int]]:
        """Return what fetches the requested log-probabilities of prompts, and the line where each sampling row begins.

        Line numbers are those of `logits`.
        """
        if not (plan.num_draft_tokens or any(row.scores for row in plan.rows)):
            return {}, list(range(len(logits)))
        scores, drawn_from, at = {}, [], 0
        for row in plan.rows:
            stop = at + row.num_logits
            if row.scores:
                following = row.request.prompt_ids[row.start + 1 : row.end + 1]
                count = row.request.params.num_prompt_logprobs or 0
                lines = logits[at : at + len(following)]
                scores[row.request.request_id] = self._sampler.tell(lines, placed(following, logits.device), count)
            if row.samples:
                drawn_from.append(stop - 1 - len(row.draft_ids))
            at = stop
        return scores, drawn_from


class _Submitted(NamedTuple):
    """A step that is being sampled.

    `rows` are those that sample, and `lines` the index of the first row of logits of each.
    """

    rows: list[StepRow]
    lines: list[int]
    scores: dict[RequestId, Callable[[], torch.Tensor]]
    logits: torch.Tensor
    drawing: Drawing
    vectors: dict[RequestId, Vector]


def _segments(rows: Sequence[StepRow], counts: Sequence[int]) -> Iterator[Segment]:
    """Yield the segments of a batch that holds the last `counts[i]` tokens of each row i."""
    at = 0
    for row, count in zip(rows, counts, strict=True):
        stop = at + count
        yield row.request.adapter, max(at, min(stop, stop - row.stop + row.request.adapter_start)), stop
        at = stop
