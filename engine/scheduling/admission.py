"""Lets requests in that can be served in time, and refuses the others at once with the time at which they could.

A request is refused where the forecast (`engine.scheduling.forecast`) says that

- its own bound of tokens would not be there by its deadline,
- the deadline of one that is before it could no longer be kept,
- it would wait longer than `max_queue_s` until its prompt is begun.

Before there are measurements, everything is let in that finds room. Pure; requests are asked about one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import ResolvedConfig
from engine.errors import OverloadError
from engine.request import Request
from engine.scheduling.backlog import BacklogReader
from engine.scheduling.forecast import Backlog, Capacity, Forecast, forecast, least_s
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts

MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
RISK = 1.25
"""A deadline that leaves less than so many times what the answer takes is at risk."""
FALLBACK_RATE = 1.0
"""Requests a second, before anything is known."""


class Admission:
    """The door of one engine.

    Args:
        num_lent: returns the blocks of the cache that requests cannot have.

    Attributes:
        costs: what steps cost; told by who runs them.
        reader: of what is before a request.
        refused_by_reason: how many were refused, by `engine.errors.OverloadError.reason`.
    """

    def __init__(self, config: ResolvedConfig, reader: BacklogReader, num_lent: Callable[[], int] = lambda: 0) -> None:
        self._config = config
        self._num_lent = num_lent
        self.costs = StepCosts()
        self.reader = reader
        self.refused_by_reason: dict[str, int] = {}

    def check_queue(self, num_waiting: int, num_running: int, requests_per_s: float) -> None:
        """Refuse whoever finds the queue full; it may come back when half of it will be gone.

        Args:
            requests_per_s: at which requests have ended while there was work; 0 before any has.

        Raises:
            OverloadError: it is full.
        """
        # Rows that are free now will be given to the first of those who wait.
        if num_waiting >= self._config.max_queued_requests + self._config.max_num_seqs - num_running:
            raise self._refusal(
                "queue_full",
                f"The queue of this replica is full: {num_waiting} requests are waiting.",
                num_waiting / 2 / (requests_per_s or FALLBACK_RATE),
            )

    def check_time(self, request: Request, backlog: Backlog, prompt_tokens: int, now_s: float) -> None:
        """Refuse whoever could not be served in time.

        Args:
            prompt_tokens: of a step that also decodes, as things are.

        Raises:
            OverloadError: it could not, or only at the cost of one that was promised to be.
        """
        # Who goes on, after its replica has died or in a beam search, was let in before.
        if request.prior_output_ids or not self.costs.is_known(now_s):
            return
        foretold = forecast(
            self.reader.asking_load(request), backlog, self._capacity(backlog, prompt_tokens), self.costs, now_s
        )
        if request.deadline_s is not None:
            self._check_deadline(foretold, request.deadline_s - now_s)
        if foretold.breaks_s > 0:
            raise self._refusal(
                "deadline", "The server's capacity is committed to requests with deadlines.", foretold.breaks_s
            )
        bound_s = self._config.max_queue_s
        if foretold.start_s > bound_s:
            raise self._refusal(
                "queue_time",
                f"The request would wait {foretold.start_s:.1f} s for its turn, longer than {bound_s:g} s.",
                foretold.start_s - bound_s,
            )

    def is_too_late(self, live: LiveRequest, now_s: float) -> bool:
        """Whether a waiting request could not end by its deadline even if it had the engine for itself from now on."""
        return not live.output_ids and self._is_short_of_time(live, now_s, num_rows=1, margin=1.0)

    def is_at_risk(self, live: LiveRequest, num_running: int, now_s: float) -> bool:
        """Whether a waiting request will miss its deadline unless it begins soon, beside those that run."""
        return self._is_short_of_time(live, now_s, num_rows=num_running + 1, margin=RISK)

    def _is_short_of_time(self, live: LiveRequest, now_s: float, *, num_rows: int, margin: float) -> bool:
        """Whether a deadline leaves less than `margin` times what the answer takes in steps of so many rows."""
        deadline_s = live.request.deadline_s
        if deadline_s is None or not self.costs.is_known(now_s):
            return False
        takes_s = least_s(self.reader.load(live), self._capacity(Backlog(), 0), self.costs, num_rows)
        return now_s + margin * takes_s > deadline_s

    def _check_deadline(self, foretold: Forecast, left_s: float) -> None:
        if foretold.end_s <= left_s:
            return
        could_be = foretold.alone_s <= left_s
        never = "; it would not be kept even without other requests: ask for fewer tokens, or give it more time"
        advice = "" if could_be else never
        raise self._refusal(
            "deadline",
            f"The answer would take {_told(foretold.end_s)}, and its deadline is in {_told(max(0.0, left_s))}{advice}.",
            foretold.end_s - left_s if could_be else MAX_RETRY_AFTER_S,
        )

    def _capacity(self, backlog: Backlog, prompt_tokens: int) -> Capacity:
        config = self._config
        num_rows, num_blocks = min(config.max_num_seqs, config.max_batched_tokens), config.num_blocks - self._num_lent()
        if backlog.is_empty:
            return Capacity(num_rows=num_rows, num_blocks=num_blocks, prompt_tokens=config.max_batched_tokens)
        bounds = (prompt_tokens, config.max_batched_tokens - num_rows, config.max_prefill_tokens_with_decodes)
        beside = min(bound for bound in bounds if bound is not None)
        return Capacity(num_rows=num_rows, num_blocks=num_blocks, prompt_tokens=max(1, beside))

    def _refusal(self, reason: str, message: str, retry_after_s: float) -> OverloadError:
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1
        bounded_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, retry_after_s))
        return OverloadError(message, retry_after_s=bounded_s, reason=reason)


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
