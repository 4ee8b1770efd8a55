"""Fair shares of the engine: flows that have used much are served later. Pure: standard library only.

Each pair of tenant and adapter is a flow. A request gets a start tag on arrival: the virtual time or, if later, the
time by which its flow's earlier requests would be done if the flow had the engine to itself. Requests are served in
order of their tags, and virtual time is the highest tag served so far. Hence

- a flow that is alone, or asks for less than there is, is served as its requests arrive;
- a request of any other flow is served before the backlog of a flow that floods the engine;
- flows that all have a backlog get equal service, to within one request each.

Virtual time also creeps forward with every step, so that no crowd of new flows can make anyone wait forever.

**Source:** Goyal, Vin, Cheng, "Start-time Fair Queueing" (SIGCOMM 1996). Costs follow Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024): prompt tokens plus output tokens, the latter estimated from the flow's
earlier answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KNOWN_FLOWS = 4096
FIRST_GUESS_TOKENS = 64.0
NEW_SHARE = 0.2
"""Weight of the newest answer in a flow's mean output length."""
CREEP = 1 / 64
"""Advance of virtual time per step: small compared with what a step serves, but not zero."""


@dataclass(slots=True)
class _Flow:
    next_tag: float = 0.0
    num_live: int = 0
    mean_output: float = FIRST_GUESS_TOKENS


class FairQueue:
    """Assigns start tags to requests.

    Args:
        num_rows: requests that can decode at once.
        step_tokens: prompt tokens that one step can compute.
    """

    def __init__(self, *, num_rows: int, step_tokens: int) -> None:
        self._num_rows = num_rows
        self._step_tokens = step_tokens
        # Least recently used first; flows with live requests are never evicted.
        self._flows: OrderedDict[Hashable, _Flow] = OrderedDict()
        self._time = 0.0

    def note_step(self) -> None:
        """Advance virtual time by the creep of one step."""
        self._time += CREEP

    def note_service(self, tag: float) -> None:
        """Record that a request with this tag is served."""
        self._time = max(self._time, tag)

    def tag(self, flow: Hashable, *, num_prompt: int, max_output: int, swap_steps: float = 0.0) -> float:
        """Return the start tag of a new request, in steps. `end` must be called when the request ends.

        Args:
            swap_steps: cost of fetching the request's adapter, charged to its flow like tokens.
        """
        start = self.next_tag(flow)
        known = self._flows.setdefault(flow, _Flow())
        self._flows.move_to_end(flow)
        known.next_tag = start + swap_steps + self.cost(flow, num_prompt=num_prompt, max_output=max_output)
        known.num_live += 1
        return start

    def next_tag(self, flow: Hashable) -> float:
        """Return the start tag that a new request of a flow would get; any thread."""
        known = self._flows.get(flow)
        # An idle flow starts afresh: it does not pay for time that no other flow wanted.
        return self._time if known is None or not known.num_live else max(self._time, known.next_tag)

    def mean_output(self, flow: Hashable) -> float:
        """Return the mean number of output tokens of the flow's answers; any thread."""
        known = self._flows.get(flow)
        return FIRST_GUESS_TOKENS if known is None else known.mean_output

    def end(self, flow: Hashable, *, num_output: int | None, unused: float = 0.0) -> None:
        """Record the end of a request.

        Args:
            num_output: its number of output tokens; None if it generates none, or never had its turn.
            unused: what was charged for a request that never had its turn, which the flow gets back.
        """
        known = self._flows[flow]
        known.num_live -= 1
        known.next_tag -= unused
        if num_output is not None:
            known.mean_output += NEW_SHARE * (num_output - known.mean_output)
        while len(self._flows) > MAX_KNOWN_FLOWS:
            idle = next((name for name, other in self._flows.items() if not other.num_live), None)
            if idle is None:
                return
            del self._flows[idle]

    def cost(self, flow: Hashable, *, num_prompt: int, max_output: int) -> float:
        """Return the expected time of the whole engine that a request uses, in steps."""
        return num_prompt / self._step_tokens + min(max_output, self.mean_output(flow)) / self._num_rows
