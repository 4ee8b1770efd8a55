"""Fair shares of the engine: who has had much comes later. Pure: standard library only.

Every adapter of every tenant is a flow. A request gets a start tag as it comes: the virtual time or, where its
flow's earlier requests have claimed more than that, the time by which they would be done if the flow had the engine for
itself. Requests are served by tag, and virtual time is the latest tag that was served, so that

- a flow that is alone, or asks for less than there is, is served as it comes;
- a request of any other flow comes before the backlog of one that floods;
- of flows that all have a backlog, each gets the same service, to within one request each.

Virtual time also creeps on with every step, so that no crowd of new flows can keep anybody waiting for ever.

**Source:** Goyal, Vin, Cheng, "Start-time Fair Queueing" (SIGCOMM 1996); the costs are those of Sheng et al., "Fairness
in Serving Large Language Models" (OSDI 2024): tokens of prompt and answer, of which the answer's are expected to be as
many as the flow's earlier answers had.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_KNOWN_FLOWS = 4096
FIRST_GUESS_TOKENS = 64.0
NEW_SHARE = 0.2
"""Weight of the newest answer in a flow's mean length."""
CREEP = 1 / 64
"""Of virtual time with each step: small beside what a step serves, and not nothing."""


@dataclass(slots=True)
class _Flow:
    next_tag: float = 0.0
    num_live: int = 0
    mean_output: float = FIRST_GUESS_TOKENS


class FairQueue:
    """Start tags for requests.

    Args:
        num_rows: requests that decode at once.
        step_tokens: prompt tokens that one step computes.
    """

    def __init__(self, *, num_rows: int, step_tokens: int) -> None:
        self._num_rows = num_rows
        self._step_tokens = step_tokens
        # Least recently used first; flows with live requests are never forgotten.
        self._flows: OrderedDict[Hashable, _Flow] = OrderedDict()
        self._time = 0.0

    def note_step(self) -> None:
        """Let virtual time creep on."""
        self._time += CREEP

    def note_service(self, tag: float) -> None:
        """Take note that a request of this tag is served."""
        self._time = max(self._time, tag)

    def tag(self, flow: Hashable, *, num_prompt: int, max_output: int, swap_steps: float = 0.0) -> float:
        """Return the start tag of a new request, in steps; `end` must follow once it has ended.

        Args:
            swap_steps: what it costs to fetch the request's adapter, which its flow pays for as for tokens.
        """
        start = self.next_tag(flow)
        known = self._flows.setdefault(flow, _Flow())
        self._flows.move_to_end(flow)
        known.next_tag = start + swap_steps + self.cost(flow, num_prompt=num_prompt, max_output=max_output)
        known.num_live += 1
        return start

    def next_tag(self, flow: Hashable) -> float:
        """Return the start tag that a new request of a flow would get; any thread may ask."""
        known = self._flows.get(flow)
        # Nobody pays for time that nobody else wanted: a flow without requests starts anew.
        return self._time if known is None or not known.num_live else max(self._time, known.next_tag)

    def mean_output(self, flow: Hashable) -> float:
        """Return how many tokens the flow's answers have in the mean; any thread may ask."""
        known = self._flows.get(flow)
        return FIRST_GUESS_TOKENS if known is None else known.mean_output

    def end(self, flow: Hashable, *, num_output: int | None) -> None:
        """Take note of the end of a request and of how many tokens it was answered with; None where it wanted none."""
        known = self._flows[flow]
        known.num_live -= 1
        if num_output is not None:
            known.mean_output += NEW_SHARE * (num_output - known.mean_output)
        while len(self._flows) > MAX_KNOWN_FLOWS:
            idle = next((name for name, other in self._flows.items() if not other.num_live), None)
            if idle is None:
                return
            del self._flows[idle]

    def cost(self, flow: Hashable, *, num_prompt: int, max_output: int) -> float:
        """Return the time that a request is expected to take of the whole engine, in steps."""
        return num_prompt / self._step_tokens + min(max_output, self.mean_output(flow)) / self._num_rows
