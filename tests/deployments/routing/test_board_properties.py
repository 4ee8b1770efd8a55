from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.routing.asked import Asked
from deployments.routing.board import EQUAL_S, EQUAL_SHARE, LOST_S, Board
from deployments.routing.estimate import ReplicaState, estimate
from deployments.routing.report import LoadReport

NAMES = tuple("abcde")
reports = st.builds(
    LoadReport,
    model=st.just("m"),
    replica_id=st.sampled_from(NAMES),
    queued_tokens=st.integers(0, 5000),
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 4),
    max_running=st.just(8),
    landmark_blocks=st.just(1),
    prefill_tokens_per_s=st.sampled_from([0.0, 500.0, 1000.0]),
    turnover_s=st.sampled_from([0.0, 0.1]),
    stalled_s=st.sampled_from([0.0, 0.0, 4.0]),
    adapter_load_s=st.sampled_from([0.0, 0.5]),
    is_whole=st.booleans(),
    landmarks_added=st.lists(st.integers(0, 9), max_size=10),
    landmarks_dropped=st.lists(st.integers(0, 9), max_size=3),
    adapters_on_device=st.lists(st.integers(1, 3)),
    adapters_coming=st.lists(st.integers(1, 3)),
    adapters_dropped=st.lists(st.integers(1, 3)),
)
requests = st.builds(
    Asked,
    request_id=st.uuids().map(str),
    num_tokens=st.integers(161, 400),
    block_marks=st.integers(0, 10).map(lambda depth: tuple(range(depth))),
    adapter=st.none() | st.integers(1, 3),
)


@settings(deadline=None)
@given(st.lists(reports, max_size=12), requests)
def test_nobody_is_chosen_where_another_is_clearly_sooner(told: list[LoadReport], asked: Asked) -> None:
    board, states = Board(), {name: ReplicaState(name) for name in NAMES}
    board.set_replicas(NAMES)
    for report in told:
        board.hear(report, 0.0, "link")
        states[report.replica_id].hear(report, 0.0, "link")
    defaults = board._averages(0.0)
    found = {name: estimate(asked, state, 0.0, defaults) for name, state in states.items()}
    cost_by_id = board._costs(asked, found, defaults, 0.0)
    order = board.choose(asked, NAMES, 0.0)
    least = min(cost_by_id.values())
    assert sorted(order) == list(NAMES)
    assert cost_by_id[order[0]] <= least + max(EQUAL_S, EQUAL_SHARE * least)
    assert order[1:] == sorted(order[1:], key=lambda name: (cost_by_id[name], name))
    # The same knowledge gives the same choice, in whatever order the candidates come.
    board.end(asked.request_id)
    again = Board()
    again.set_replicas(NAMES[::-1])
    for report in told:
        again.hear(report, 0.0, "link")
    assert again.choose(asked, NAMES[::-1], 0.0) == order


class BoardLife(RuleBasedStateMachine):
    """Reports, requests, losses and changes of Serve's list in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board()
        self.now_s = 0.0
        self.listed: list[str] = []
        self.open: dict[str, str] = {}
        self.lost: dict[str, float] = {}
        self.sources: dict[str, int] = {}

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def list_replicas(self, names: set[str]) -> None:
        self.listed = sorted(names)
        self.board.set_replicas(self.listed)
        self.lost = {name: until for name, until in self.lost.items() if name in names}
        self.open = {request: name for request, name in self.open.items() if name in names}

    @rule(report=reports)
    def hear(self, report: LoadReport) -> None:
        if report.replica_id in self.listed:
            self.board.hear(report, self.now_s, report.replica_id)
            if report.is_whole:
                self.lost.pop(report.replica_id, None)
                self.sources[report.replica_id] = 1

    @rule(asked=requests)
    def ask(self, asked: Asked) -> None:
        order = self.board.choose(asked, self.listed, self.now_s)
        alive = {name for name in self.listed if self.lost.get(name, 0.0) <= self.now_s}
        assert alive <= set(order) <= set(self.listed)
        if order:
            self.open[asked.request_id] = order[0]

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.open:
            request = data.draw(st.sampled_from(sorted(self.open)))
            name = self.open.pop(request)
            self.board.lose_request(request, self.now_s)
            order = self.board.choose(Asked(request_id="probe", num_tokens=10), self.listed, self.now_s)
            assert name not in order
            self.board.end("probe")
            self.lost[name] = self.now_s + LOST_S

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def move(self, data: st.DataObject, name: str) -> None:
        if self.open and name in self.listed:
            request = data.draw(st.sampled_from(sorted(self.open)))
            self.board.move(request, name)
            self.open[request] = name

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.board.lose(name)
        self.listed = [listed for listed in self.listed if listed != name]
        self.open = {request: on for request, on in self.open.items() if on != name}
        self.lost.pop(name, None)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.open:
            request = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[request]
            self.board.end(request)

    @rule(seconds=st.sampled_from([0.05, 1.0, LOST_S]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds_no_more_than_what_is_open(self) -> None:
        assert len(self.board._replica_by_request) == len(self.open)
        states = self.board._state_by_id.values()
        assert sum(len(state.sent) for state in states) == len(self.open)
        assert all(state.sent or not state.sent_landmarks for state in states)


TestBoardLife = BoardLife.TestCase
TestBoardLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
