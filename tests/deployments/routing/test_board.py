from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.routing.asked import Asked
from deployments.routing.board import LOST_S, MAX_ADAPTERS, MEMORY_S, AdapterDemand, Board, board_of, weight
from deployments.routing.report import LoadReport


def report_of(replica_id: str, **changes: object) -> LoadReport:
    fields: dict[str, object] = {
        "max_running": 16, "landmark_blocks": 1, "prefill_tokens_per_s": 1000.0, "adapter_load_s": 0.5,
        "is_whole": True,
    }  # fmt: skip
    return LoadReport(model="m", replica_id=replica_id, **fields | changes)  # type: ignore[arg-type]


def board_with(*reports: LoadReport) -> Board:
    board = Board()
    board.set_replicas([report.replica_id for report in reports])
    for report in reports:
        board.hear(report, 0.0, report.replica_id)
    return board


def asked(name: str = "r", *marks: int, adapter: int | None = None) -> Asked:
    return Asked(request_id=name, num_tokens=16 * len(marks) + 100, block_marks=marks, adapter=adapter)


AB = ["a", "b"]


def test_a_prefix_draws_its_requests_until_the_queue_costs_more() -> None:
    board = board_with(report_of("a", landmarks_added=range(20)), report_of("b"))
    assert board.choose(asked("r1", *range(20)), AB, 0.0)[0] == "a"
    board.hear(report_of("a", landmarks_added=range(20), queued_tokens=1000), 0.0, "a")
    assert board.choose(asked("r2", *range(20)), AB, 0.0)[0] == "b"


def test_a_prefix_does_not_draw_its_requests_into_the_last_rows() -> None:
    warm = report_of("a", landmarks_added=range(6), turnover_s=0.5)
    for taken, chosen in ((13, "a"), (15, "b")):
        board = board_with(replace(warm, num_running=taken), report_of("b"))
        assert board.choose(asked("r", *range(6)), AB, 0.0)[0] == chosen


def test_a_burst_with_one_prefix_stays_together_and_one_without_is_spread() -> None:
    """None of it is in any report yet: what was sent is counted."""
    board = board_with(report_of("a"), report_of("b"))
    same = [board.choose(asked(f"s{i}", *range(60)), AB, 0.0)[0] for i in range(4)]
    assert len(set(same)) == 1
    board = board_with(report_of("a"), report_of("b"))
    different = [board.choose(asked(f"d{i}", *range(100 * i, 100 * i + 60)), AB, 0.0)[0] for i in range(6)]
    assert sorted(different) == ["a", "a", "a", "b", "b", "b"]


def test_a_burst_that_shares_only_a_short_prefix_is_spread() -> None:
    """Each prompt begins with the same block, which takes a millisecond to compute."""
    rows = {"max_running": 64, "prefill_tokens_per_s": 16_000.0}
    board = board_with(report_of("a", **rows, landmarks_added=[7]), report_of("b", **rows))
    chosen = [board.choose(Asked(request_id=f"{i}", num_tokens=24, block_marks=[7]), AB, 0.0)[0] for i in range(8)]
    assert 3 <= chosen.count("a") <= 5


def test_two_gateways_choose_the_same_for_what_nobody_has() -> None:
    boards = [board_with(report_of("a"), report_of("b"), report_of("c")) for _ in range(2)]
    for i in range(20):
        first, second = (board.choose(asked(f"{i}", 1000 * i), ["a", "b", "c"], 0.0)[0] for board in boards)
        assert first == second
        for board in boards:
            board.end(f"{i}")


def test_the_dead_are_forgotten_and_left_alone() -> None:
    board = board_with(report_of("a", landmarks_added=range(20)), report_of("b", queued_tokens=500_000))
    assert board.choose(asked("sent", *range(20)), AB, 1.0)[0] == "a"
    assert board.lose_source("a", 1.0) == ["sent"]
    board.end("sent")
    assert board.choose(asked("r", *range(20)), AB, 1.0) == ["b"]
    assert board.unheard()
    # It was only the connection: it is as one that nothing is known of.
    assert board.choose(asked("r", *range(20)), AB, 1.0 + LOST_S)[0] == "a"
    board.lose("b")
    assert board.choose(asked("q"), ["a"], 1.0 + LOST_S) == ["a"]


def test_a_lost_request_does_not_go_back_where_it_was_lost() -> None:
    board = board_with(report_of("a", landmarks_added=range(20)), report_of("b"))
    assert board.choose(asked("r-0", *range(20)), AB, 0.0)[0] == "a"
    board.lose_request("r-0", 0.0)
    assert board.choose(asked("r-1", *range(20)), AB, 0.1) == ["b"]
    board.hear(report_of("a", is_whole=False), 0.2, "a")
    board.end("r-1")
    assert board.choose(asked("r-2", *range(20)), AB, 0.2)[0] == "a"
    board.lose_request("r-2", 0.2)
    board.choose(asked("r-3"), AB, 0.2)
    board.lose_request("r-3", 0.2)
    assert board.choose(asked("r-4"), AB, 0.2) == []


def test_a_cold_adapter_has_one_home_and_a_hot_one_several() -> None:
    names = [f"replica-{i}" for i in range(8)]
    board = board_with(*(report_of(name) for name in names))

    def homes(adapter: int, num: int, gap_s: float, start_s: float) -> set[str]:
        chosen = set()
        for i in range(num):
            now_s = start_s + i * gap_s
            for name in names:
                board.hear(report_of(name), now_s, name)
            (best, *_) = board.choose(asked(f"{adapter}-{i}", 10_000 * adapter + i, adapter=adapter), names, now_s)
            chosen.add(best)
            board.end(f"{adapter}-{i}")
        return chosen

    assert homes(1, 10, 10.0, 0.0) == {max(names, key=lambda name: weight(1, name))}
    # A request's prompt takes a tenth of a second here: these would keep four replicas busy.
    assert 3 <= len(homes(2, 2000, 0.025, 200.0)) <= 8


def test_a_request_that_is_placed_again_and_again_is_one_demand() -> None:
    """Serve asks up to forty times a second while all replicas are full: one request of a cold adapter made it hot."""
    names = tuple("abcdefgh")
    board = board_with(*(report_of(name, turnover_s=2.0) for name in names))
    for number in range(60):
        board.choose(asked("r", *range(10), adapter=1), names, 0.5 * number)
    assert board._demand.num_homes(1, 30.0, 1) == 1
    once = board_with(*(report_of(name, turnover_s=2.0) for name in names))
    once.choose(asked("r", *range(10), adapter=1), names, 0.0)
    assert board._demand.share(1, 30.0) == once._demand.share(1, 30.0) > 0


def test_a_hot_adapter_deserves_more_replicas_and_a_cold_one_one() -> None:
    demand = AdapterDemand()
    for step in range(1000):
        demand.note(1, 0.15, step / 10)
    demand.note(2, 0.15, 100.0)
    assert abs(demand.share(1, 100.0) - 1.5) < 0.1
    assert (demand.num_homes(1, 100.0, 1), demand.num_homes(1, 100.0, 2)) == (3, 6)
    assert demand.num_homes(2, 100.0, 1) == demand.num_homes(3, 100.0, 1) == 1
    assert demand.num_homes(1, 100.0 + 10 * MEMORY_S, 1) == 1


def test_the_demand_of_no_more_adapters_is_kept_than_the_bound() -> None:
    demand = AdapterDemand()
    for adapter in range(MAX_ADAPTERS + 10):
        demand.note(adapter, 1.0, 0.0)
        demand.note(1, 1.0, 0.0)
    assert len(demand._by_adapter) == MAX_ADAPTERS
    assert demand.share(0, 0.0) == 0.0 < demand.share(MAX_ADAPTERS + 9, 0.0)
    assert demand.share(1, 0.0) > MAX_ADAPTERS / MEMORY_S


@pytest.mark.parametrize(("load_s", "stays_home"), [(0.001, False), (0.4, True), (0.0, True)])
def test_a_cold_adapter_leaves_its_home_for_a_prefix_only_if_it_is_soon_loaded(load_s: float, stays_home: bool) -> None:
    """As long as nobody has loaded one, the time is a guess."""
    home, other = sorted(AB, key=lambda name: weight(1, name), reverse=True)
    cached = report_of(other, adapter_load_s=load_s, landmarks_added=range(10))
    board = board_with(report_of(home, adapter_load_s=load_s), cached)
    assert board.choose(asked("r", *range(10), adapter=1), AB, 0.0)[0] == (home if stays_home else other)


def test_what_replicas_measure_later_counts_for_those_that_have_not() -> None:
    board = board_with(report_of("a"), report_of("b", prefill_tokens_per_s=0.0))
    board.choose(asked("r1"), AB, 0.0)
    board.end("r1")
    slow = report_of("a", prefill_tokens_per_s=10.0, landmarks_added=[1])
    board.hear(slow, 1.0, "a")
    assert board.choose(asked("r2", 1), AB, 1.0)[0] == "a"


def test_a_loaded_adapter_draws_its_requests_wherever_it_is() -> None:
    for adapter in range(8):
        board = board_with(report_of("a", adapters_on_device=(adapter,)), report_of("b"))
        assert board.choose(asked(adapter=adapter), AB, 0.0)[0] == "a"


def test_memory_is_bounded_by_what_is_open() -> None:
    board = board_with(report_of("a"), report_of("b"))
    for i in range(100):
        board.choose(asked(f"{i}", i), AB, 0.0)
    assert len(board._replica_by_request) == 100
    for i in range(100):
        board.end(f"{i}")
        board.end(f"{i}")
    assert len(board._replica_by_request) == 0
    board.choose(asked("last"), AB, 0.0)
    board.set_replicas([])
    assert len(board._replica_by_request) == 0


def test_those_whose_end_nobody_tells_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.routing.board.MAX_OPEN", 10)
    board = board_with(report_of("a"), report_of("b"))
    for i in range(30):
        board.choose(asked(f"{i}", i), AB, 0.0)
    assert len(board._replica_by_request) == 10


def test_blocks_are_named_only_where_prefixes_are_kept() -> None:
    assert Board().block_tokens == 0
    assert board_with(report_of("a", landmark_blocks=0)).block_tokens == 0
    assert board_with(report_of("a"), replace(report_of("b"), block_tokens=16)).block_tokens == 16
    assert board_of("x") is board_of("x")
