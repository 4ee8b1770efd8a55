"""Admission control: accept requests that can be served in time and refuse the rest at once, with a retry time.

A request is refused if the forecast (`engine.scheduling.forecast`) says that

- it could not generate its maximum number of tokens by its deadline,
- it would make an earlier request miss a deadline that could otherwise be kept, or
- its prompt would wait longer than `max_queue_s` to start.

Until step costs are known, every request is accepted as long as the queue has room. Pure; requests are checked one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from engine.config import ResolvedConfig
from engine.errors import OverloadError
from engine.request import Request
from engine.scheduling.backlog import BacklogReader
from engine.scheduling.expected_hits import Outlook
from engine.scheduling.forecast import Backlog, EngineCapacity, Forecast, forecast, least_s
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts

MAX_RETRY_AFTER_S = 120.0
MIN_RETRY_AFTER_S = 1.0
SAFE = 2.5
"""A deadline is safe from what may pass its prompt if it leaves this multiple of the time that the answer takes."""
FALLBACK_RATE = 1.0
"""Requests per second, assumed until a rate has been measured."""


class AdmissionControl:
    """Admission control of one engine.

    Args:
        num_lent: returns how many cache blocks are lent and thus unavailable to requests.

    Attributes:
        costs: step costs, updated by whoever runs the steps.
        reader: reads the backlog ahead of a request.
        refused_by_reason: refusals counted by `engine.errors.OverloadError.reason`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        reader: BacklogReader,
        num_lent: Callable[[], int] = lambda: 0,
        costs: StepCosts | None = None,
    ) -> None:
        self._config = config
        self._num_lent = num_lent
        self.costs = costs or StepCosts()
        self.reader = reader
        self.refused_by_reason: dict[str, int] = {}

    def check_queue(self, num_waiting: int, num_running: int, requests_per_s: float, priority: int = 0) -> None:
        """Refuse a request if the queue is full; the retry time is when half of the queue should be gone.

        Half of the queue is kept for usual priorities: the lines of a batch would fill all of it for hours.

        Args:
            requests_per_s: rate at which requests have ended while there was work; 0 before any has.

        Raises:
            OverloadError: the queue is full.
        """
        max_queued = self._config.max_queued_requests // (2 if priority > 0 else 1)
        # Rows that are free now will go to the first waiting requests.
        if num_waiting >= max_queued + self._config.max_num_seqs - num_running:
            raise self._refusal(
                "queue_full",
                f"The queue of this replica is full: {num_waiting} requests are waiting.",
                num_waiting / 2 / (requests_per_s or FALLBACK_RATE),
            )

    def check_time(
        self, request: Request, outlook: Outlook, backlog: Backlog, prompt_tokens: int, now_s: float
    ) -> None:
        """Refuse a request that could not be served in time.

        Args:
            prompt_tokens: current limit of prompt tokens in a step that also decodes.

        Raises:
            OverloadError: it would be late, or would make an accepted request miss its deadline.
        """
        # Whoever has an idle engine to itself measures it anew. Those behind it are judged by what was known before:
        # else a burst would be admitted whole whenever nobody had asked for a while.
        is_known = self.costs.is_known(now_s) if backlog.is_empty else self.costs.has_decode_steps
        # A continuation, after its replica died or in a beam search, was admitted before.
        if request.prior_output_ids or not is_known:
            return
        foretold = forecast(
            self.reader.asking_load(request, outlook),
            backlog,
            self._capacity(backlog, prompt_tokens),
            self.costs,
            now_s,
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

    def spare_s(self, live: LiveRequest, now_s: float, *, num_rows: int, margin: float) -> float:
        """Return the seconds left of a waiting request beyond `margin` times what its answer takes beside others.

        Infinite if that is unknown or it has no deadline; `num_rows` is the number of rows of its steps.
        """
        deadline_s = live.request.deadline_s
        if deadline_s is None or not self.costs.is_known(now_s):
            return inf
        takes_s = least_s(self.reader.load(live), self._capacity(Backlog(), 0), self.costs, num_rows)
        return deadline_s - now_s - margin * takes_s

    def backlog(self, request: Request, outlook: Outlook, unread: Iterable[Request], now_s: float) -> Backlog:
        """Return the requests served before one that is not added yet; `unread` as for `BacklogReader.before`."""
        return self.reader.before(request, outlook, unread, partial(self.is_at_risk, now_s=now_s))

    def is_at_risk(self, live: LiveRequest, now_s: float) -> bool:
        """Return whether a request might miss its deadline if its prompt took twice as many steps."""
        if live.request.deadline_s is None:
            return False
        num_rows = self.reader.num_running + 1
        return not self.costs.is_known(now_s) or self.spare_s(live, now_s, num_rows=num_rows, margin=SAFE) <= 0

    def _check_deadline(self, foretold: Forecast, left_s: float) -> None:
        if foretold.end_s <= left_s:
            return
        could_be = foretold.alone_s <= left_s
        never = "; it would not be kept even without other requests: ask for fewer tokens, or give it more time"
        advice = "" if could_be else never
        raise self._refusal(
            "deadline",
            f"The answer would take {_told(foretold.end_s)}, and its deadline is in {_told(max(0.0, left_s))}{advice}.",
            foretold.end_s - left_s,
            is_final=not could_be,
        )

    def _capacity(self, backlog: Backlog, prompt_tokens: int) -> EngineCapacity:
        config = self._config
        num_rows, num_blocks = min(config.max_num_seqs, config.max_batched_tokens), config.num_blocks - self._num_lent()
        if backlog.is_empty:
            return EngineCapacity(num_rows=num_rows, num_blocks=num_blocks, prompt_tokens=config.max_batched_tokens)
        # Those before it decode at worst, all at once.
        num_decodes = min(num_rows, len(backlog.running) + len(backlog.waiting))
        bounds = (prompt_tokens, config.max_batched_tokens - num_decodes, config.max_prefill_tokens_with_decodes)
        beside = min(bound for bound in bounds if bound is not None)
        return EngineCapacity(num_rows=num_rows, num_blocks=num_blocks, prompt_tokens=max(1, beside))

    def _refusal(self, reason: str, message: str, retry_after_s: float, *, is_final: bool = False) -> OverloadError:
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1
        bounded_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, retry_after_s))
        return OverloadError(message, retry_after_s=bounded_s, reason=reason, is_final=is_final)


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"
