"""Requests that ask again and again for more beginnings than the cache holds get what each would get alone, whenever
what copies goes on, is given up, or dies with its process. `Harness` checks each slot that a step reads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.config import ResolvedConfig
from engine.request import FinishReason, Request
from tests.engine.hand_driven_mover import HandDrivenMover
from tests.engine.scheduling.test_own_step import teach
from tests.engine.scripted import Harness, a_config, a_request
from tests.engine.scripted_mover import ScriptedMover
from tests.oracles.naive_scheduler import answer_alone

pytestmark = pytest.mark.usefixtures("small_tiles")

STEMS = [tuple((7 * i + j) % 20 for j in range(12)) for i in range(6)]

movers = st.builds(
    ScriptedMover,
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    steps=st.integers(0, 5),
    losing=st.sampled_from([0, 0, 5]),
)
asked = st.tuples(
    st.sampled_from(STEMS), st.integers(6, 12), st.lists(st.integers(0, 19), max_size=3), st.integers(0, 3)
)
"""A beginning, how much of it, what follows, and steps until the next one."""


@given(
    mover=movers,
    requests=st.lists(asked, min_size=8, max_size=20),
    block_tokens=st.sampled_from([1, 2, 4]),
    num_seqs=st.integers(1, 4),
    steps_ahead=st.integers(0, 1),
    windows=st.sampled_from([(0,), (0, 3), (0, 5, 5), (4,)]),
)
def test_answers_do_not_depend_on_tiers(
    mover: ScriptedMover,
    requests: list[tuple[tuple[int, ...], int, list[int], int]],
    block_tokens: int,
    num_seqs: int,
    steps_ahead: int,
    windows: tuple[int, ...],
) -> None:
    longest = 20
    per_request = -(-longest // block_tokens)
    config = a_config(
        max_model_len=longest,
        max_num_seqs=num_seqs,
        block_tokens=block_tokens,
        num_blocks=2 * per_request * len(windows),
        windows=windows,
        max_queued_requests=100,
    )
    harness = Harness(config, mover=mover, steps_ahead=steps_ahead)
    made = {}
    for number, (stem, count, tail, steps) in enumerate(requests):
        made[f"r{number}"] = request = a_request(f"r{number}", (*stem[:count], *tail), max_tokens=3)
        harness.add(request)
        for _ in range(steps):
            harness.step()
    harness.finish()
    for name, request in made.items():
        assert harness.tokens(name) == answer_alone(request, longest).token_ids
    # Once more, one after the other: by now there is something below.
    for name, request in made.items():
        harness.add(replace(request, request_id=f"{name}-again"))
        harness.finish()
        assert harness.tokens(f"{name}-again") == answer_alone(request, longest).token_ids


LONGEST = 20


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    """A cache that has room for one request, or for a few."""
    block_tokens = draw(st.sampled_from([1, 2, 4]))
    config = a_config(
        max_model_len=LONGEST,
        max_num_seqs=draw(st.integers(1, 4)),
        num_guest_rows=draw(st.integers(0, 1)),
        max_batched_tokens=draw(st.sampled_from([4, 16])),
        block_tokens=block_tokens,
        windows=draw(st.sampled_from([(0,), (0,), (0, 3), (0, 5, 5), (4,)])),
        max_queued_requests=100,
        num_speculative_tokens=draw(st.sampled_from([0, 3])),
    )
    most = config.reach.most(LONGEST)
    return replace(config, num_blocks=draw(st.integers(most, 3 * most)))


class TiersMachine(RuleBasedStateMachine):
    """Requests come and go while threads copy, and engines follow each other over one disk."""

    @initialize(
        config=configs(),
        capacities=st.lists(st.integers(1, 40), min_size=1, max_size=2),
        steps_ahead=st.integers(0, 1),
        has_costs=st.booleans(),
    )
    def build(self, config: ResolvedConfig, capacities: list[int], steps_ahead: int, has_costs: bool) -> None:
        self.now, self.count = 0.0, 0
        # Drafts are made from results.
        self.config, self.steps_ahead, self.has_costs = config, steps_ahead, has_costs
        self.open(HandDrivenMover(capacities))

    def open(self, mover: HandDrivenMover) -> None:
        """Begin an engine's life."""
        self.mover = mover
        self.harness = Harness(self.config, clock=lambda: self.now, steps_ahead=self.steps_ahead, mover=mover)
        if self.has_costs:
            # Drafts, and steps of newcomers, pay; so does a fetch, if anybody has much of it.
            teach(self.harness.scheduler.admission.costs, base_s=0.1, row_s=0.2, prompt_token_s=0.1)
        self.requests: dict[str, Request] = {}

    @rule(
        stem=st.sampled_from(STEMS[:4]),
        count=st.integers(4, 12),
        tail=st.lists(st.integers(0, 19), max_size=3),
        salt=st.sampled_from(["", "", "x"]),
        adapter=st.sampled_from([None, None, "x"]),
        adapter_start=st.sampled_from([0, 0, 4, 7]),
        tenant=st.sampled_from(["", "t"]),
        max_tokens=st.integers(1, 5),
    )
    def add(self, stem: tuple[int, ...], count: int, tail: list[int], **fields: object) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.requests[name] = a_request(name, (*stem[:count], *tail), **fields)
        self.harness.add(self.requests[name])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.harness.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(data=st.data(), count=st.integers(1, 6))
    def copy_beside_a_step(self, data: st.DataObject, count: int) -> None:
        """The threads go on between its plan and its results, and while it has paused for newcomers."""

        def pauses() -> bool:
            nonlocal count
            while count:
                count -= 1
                self.copy(data.draw(st.integers(0, 1)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3)))
                if not self.steps_ahead and data.draw(st.booleans()):
                    return True
            return False

        self.harness.runner.pauses = pauses
        self.harness.step()

    @rule(tier=st.integers(0, 1), num_down=st.integers(0, 8), num_up=st.integers(0, 4))
    def copy(self, tier: int, num_down: int, num_up: int) -> None:
        for _ in range(num_down):
            self.mover.go_down(tier % len(self.mover.capacities))
        for _ in range(num_up):
            self.mover.go_up()

    @rule()
    def lose(self) -> None:
        self.mover.go_up(is_lost=True)

    @rule(seconds=st.sampled_from([0.3, 0.3, 1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def run_short(self) -> None:
        """Somebody who runs finds no block."""
        self.harness.scheduler.tiers.give_up_one()
        self.harness.scheduler.check()

    @rule()
    def begin_anew(self) -> None:
        """The process dies, and another one finds what it has left on the disk."""
        self.check_answers()
        self.open(self.mover.next_life())

    def check_answers(self) -> None:
        for name, request in self.requests.items():
            tokens, alone = self.harness.tokens(name), answer_alone(request, LONGEST)
            assert tokens == alone.token_ids[: len(tokens)]
            assert self.harness.reason(name) in (None, FinishReason.CANCELLED, alone.reason)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.mover.hurries = True
        self.harness.finish()
        self.check_answers()
        for name, request in [*self.requests.items()]:
            self.requests[f"{name} again"] = again = replace(request, request_id=f"{name} again")  # type: ignore[arg-type]
            self.harness.add(again)
            self.harness.finish()
        self.check_answers()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
