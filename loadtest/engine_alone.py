"""Run the engine without a server: prompts in, timed tokens out, on the calling thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from adapters.identity import AdapterDigest
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.metrics import EngineSnapshot
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams
from loadtest.measure import Exchange

IDLE_S = 0.001
PARTS = ("schedule_s", "prepare_s", "forward_s", "sample_s", "wait_s", "emit_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Mean time of a step in milliseconds, by part; `wall_ms` is the whole step."""

    num_steps: int
    wall_ms: float
    ms_by_part: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Result of one batch of prompts.

    Attributes:
        exchanges: one for each prompt, in order, timed from the submission of the batch.
        prefill_s: until every prompt had its first token.
        prefill_split: step times until then; where prompts need several steps, the first ones decode meanwhile.
        full_split: step times while all requests decoded, from then until the first one finished. No steps if that
            was before the last prompt had its first token.
    """

    exchanges: tuple[Exchange, ...]
    prefill_s: float
    prefill_split: StepSplit
    full_split: StepSplit


@contextmanager
def refusals_said(tool: str) -> Iterator[None]:
    """End the program with a line if the engine refuses a model or its configuration; also a decorator.

    Raises:
        SystemExit: it does.
    """
    try:
        yield
    except (CheckpointError, ConfigError) as failure:
        raise SystemExit(f"loadtest.{tool}: {failure}") from failure


class EngineAlone:
    """An engine stepped by its caller."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = count()

    def add(
        self, prompt: Sequence[int], max_tokens: int, adapter: AdapterDigest | None = None, **drawing: Any
    ) -> RequestId:
        """Add a request for exactly so many tokens, greedy unless `drawing` says otherwise."""
        request_id = RequestId(f"alone-{next(self._numbers)}")
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **drawing})
        self.engine.add(Request(request_id=request_id, prompt_ids=tuple(prompt), params=params, adapter=adapter))
        return request_id

    def step(self) -> Sequence[Emission]:
        """Compute one step, or wait a little for what other threads do, which need the GIL.

        Raises:
            RuntimeError: the engine failed on a request, or as a whole; then it takes no other.
        """
        try:
            emissions = self.engine.step()
        except Exception:
            # It does not know any more what it has under way.
            self.engine.stop()
            raise
        for emission in emissions:
            if emission.finish_reason is FinishReason.FAILED:
                raise RuntimeError(f"the engine failed: {emission.error}")
        if not emissions and not self.engine.snapshot().num_running:
            time.sleep(IDLE_S)
        return emissions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        answer_tokens: Sequence[int],
        adapters: Sequence[AdapterDigest | None] | None = None,
    ) -> Generated:
        """Run the prompts as one batch, greedily, each with its own number of answer tokens and its own adapter.

        Raises:
            RequestError: a prompt does not fit.
            RuntimeError: the engine failed on one.
        """
        before = self.engine.snapshot()
        started_s, started = time.time(), time.perf_counter()
        event_ms: dict[RequestId, list[float]] = {}
        middle, middle_s = before, 0.0
        full_end: tuple[EngineSnapshot, float] | None = None
        with self._ending(event_ms):
            for prompt, length, adapter in zip(prompts, answer_tokens, adapters or [None] * len(prompts), strict=True):
                event_ms[self.add(prompt, length, adapter)] = []
            num_open = len(event_ms)
            while num_open:
                emissions = self.step()
                now_s = time.perf_counter() - started
                for emission in emissions:
                    event_ms[emission.request_id] += [now_s * 1000] * len(emission.token_ids)
                    num_open -= emission.finish_reason is not None
                if full_end is None and num_open < len(event_ms):
                    full_end = self.engine.snapshot(), now_s
                if not middle_s and all(event_ms.values()):
                    middle, middle_s = self.engine.snapshot(), now_s
        return Generated(
            exchanges=tuple(
                _exchange(started_s, times, len(prompt))
                for times, prompt in zip(event_ms.values(), prompts, strict=True)
            ),
            prefill_s=middle_s,
            prefill_split=_split(before, middle, middle_s),
            full_split=_split(middle, *_since(middle, middle_s, full_end)),
        )

    @contextmanager
    def _ending(self, request_ids: Iterable[RequestId]) -> Iterator[None]:
        """End a batch's requests if it fails: the next batch would get their tokens, and run beside them."""
        try:
            yield
        except Exception:
            for request_id in request_ids:
                self.engine.cancel(request_id)
            while self.engine.is_alive and (self.engine.step() or self._has_requests):
                pass
            raise

    @property
    def _has_requests(self) -> bool:
        found = self.engine.snapshot()
        return found.num_running + found.num_waiting > 0

    def close(self) -> None:
        """Free the engine."""
        self.engine.stop()
        # `run` returns at once on a stopped engine, and closes what it owns.
        self.engine.run(lambda _emissions: None)


def _since(
    middle: EngineSnapshot, middle_s: float, end: tuple[EngineSnapshot, float] | None
) -> tuple[EngineSnapshot, float]:
    """Return the snapshot at the end of the phase that starts at `middle`, and its length; 0 s if there is none."""
    return (middle, 0.0) if end is None or end[1] <= middle_s else (end[0], end[1] - middle_s)


def _exchange(started_s: float, times_ms: list[float], num_prompt_tokens: int) -> Exchange:
    return Exchange(
        workload="engine",
        model="engine",
        started_s=started_s,
        status=200,
        error=None,
        event_ms=times_ms,
        end_ms=times_ms[-1],
        prompt_tokens=num_prompt_tokens,
        completion_tokens=len(times_ms),
    )


def _split(before: EngineSnapshot, after: EngineSnapshot, wall_s: float) -> StepSplit:
    num_steps = after.num_steps - before.num_steps
    steps = max(num_steps, 1)
    return StepSplit(
        num_steps=num_steps,
        wall_ms=wall_s / steps * 1000,
        ms_by_part={
            part.removesuffix("_s"): (getattr(after.step_times, part) - getattr(before.step_times, part)) / steps * 1000
            for part in PARTS
        },
    )
