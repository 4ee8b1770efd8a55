"""Limits hold for all gateways together, refuse with the time to come back, and forget gateways that are gone."""

from __future__ import annotations

import itertools
import time
from functools import partial

import fakeredis
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from limits.errors import StorageError
from limits.storage import storage_from_string

from deployments.accounts import limiter as limiter_module
from deployments.accounts.limiter import FORGET_S, SILENCE_S, Limiter
from deployments.accounts.values import Admission, Charge, Running, TenantLimits

LIMITS = TenantLimits(requests_per_minute=3, input_tokens_per_minute=100, output_tokens_per_minute=50)
_turns, _numbers = itertools.count(), itertools.count(1)


def admit(limiter: Limiter, tenant: str, limits: TenantLimits, gateway: str, input_tokens: int) -> Admission:
    """Ask for one that is the gateway's only one."""
    turn = next(_turns)
    return limiter.admit(tenant, limits, gateway, input_tokens, running=Running(0, frozenset([turn])), turn=turn)


def charge(limiter: Limiter, used: Charge) -> None:
    limiter.hear("another", {}, [used], turn=0, number=next(_numbers))


def refused_by(limiter: Limiter, limits: TenantLimits, gateway: str, turn: int, *, num_admitted: int = 0) -> str | None:
    """Ask for one beside those that the gateway knows to be admitted."""
    running = Running(num_admitted, frozenset([turn]))
    return limiter.admit("t", limits, gateway, 1, running=running, turn=turn).refused_by


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Limiter:
    if request.param == "redis":
        # Redis' own code on this side of the wire, a stand-in for the server on the other.
        pool = fakeredis.FakeRedis().connection_pool
        monkeypatch.setattr(limiter_module, "storage_from_string", partial(storage_from_string, connection_pool=pool))
        return Limiter("redis://localhost:6379")
    return Limiter("memory://")


def test_requests_are_counted_over_all_gateways(limiter: Limiter) -> None:
    for gateway in ("g1", "g2", "g1"):
        assert admit(limiter, "requests", LIMITS, gateway, 1).refused_by is None
    refused = admit(limiter, "requests", LIMITS, "g2", 1)
    assert refused.refused_by == "requests_per_minute"
    assert 0 < refused.retry_after_s <= 60
    assert refused.quotas["requests_per_minute"].remaining == 0
    assert admit(limiter, "another", LIMITS, "g2", 1).refused_by is None


def test_input_tokens_are_counted_as_a_request_begins_and_output_tokens_as_it_ends(limiter: Limiter) -> None:
    admitted = admit(limiter, "tokens", LIMITS, "g", 60)
    assert admitted.quotas["input_tokens_per_minute"][:2] == (100, 40)
    assert admit(limiter, "tokens", LIMITS, "g", 60).refused_by == "input_tokens_per_minute"
    # Another minute's worth of output was made by one answer: what is over counts too.
    charge(limiter, Charge("tokens", LIMITS, 0, 70))
    assert admit(limiter, "tokens", LIMITS, "g", 1).refused_by == "output_tokens_per_minute"


def test_a_prompt_longer_than_a_window_is_let_through_once(limiter: Limiter) -> None:
    assert admit(limiter, "long", LIMITS, "g", 5000).refused_by is None
    assert admit(limiter, "long", LIMITS, "g", 1).refused_by == "input_tokens_per_minute"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_lets_nobody_wait_longer(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter, wall = Limiter("memory://"), time.time
    while admit(limiter, "full", LIMITS, "g", 1).refused_by is None:
        pass
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    limiter.hear("g", {}, turn=next(_turns))
    assert admit(limiter, "full", LIMITS, "g", 1).refused_by is None
    while (refused := admit(limiter, "full", LIMITS, "g", 1)).refused_by is None:
        pass
    assert 0 < refused.retry_after_s <= 60


def test_what_is_refused_is_not_counted(limiter: Limiter) -> None:
    limits = TenantLimits(requests_per_minute=5, input_tokens_per_minute=10)
    admit(limiter, "refused", limits, "g", 10)
    for _ in range(20):
        assert admit(limiter, "refused", limits, "g", 1).refused_by == "input_tokens_per_minute"
    assert admit(limiter, "refused", limits, "g", 1).quotas["requests_per_minute"].remaining == 4


def test_answers_at_once_are_counted_over_gateways_that_live() -> None:
    now_s = [0.0]
    limiter = Limiter(clock=lambda: now_s[0])
    limits = TenantLimits(concurrent_requests=2)
    assert refused_by(limiter, limits, "g1", 1) is None
    assert refused_by(limiter, limits, "g2", 1) is None
    assert refused_by(limiter, limits, "g1", 2, num_admitted=1) == "concurrent_requests"
    limiter.hear("g2", {}, turn=2)
    assert limiter.num_running("t") == 1
    now_s[0] = SILENCE_S - 1
    limiter.hear("g2", {"t": Running(1)}, turn=3)
    now_s[0] = SILENCE_S + 1
    # The first has said nothing for too long; the second has.
    assert limiter.num_running("t") == 1
    limiter.hear("g2", {}, turn=4)
    assert limiter.num_running("t") == 0


def test_charges_that_are_sent_again_count_once() -> None:
    limiter, limits = Limiter(), TenantLimits(output_tokens_per_minute=100)
    for turn, number in enumerate((1, 1, 2)):
        limiter.hear("g", {}, [Charge("t", limits, 0, 30)], turn=turn, number=number)
    assert admit(limiter, "t", limits, "g", 1).quotas["output_tokens_per_minute"].remaining == 40


def test_charges_that_are_sent_again_after_a_silence_count_once_and_who_is_gone_for_good_is_forgotten() -> None:
    """A gateway that was cut off for 15 seconds, and did not know whether its last charges had arrived, had them
    counted twice."""
    now_s = [0.0]
    limiter, limits = Limiter(clock=lambda: now_s[0]), TenantLimits(output_tokens_per_minute=100, concurrent_requests=1)
    limiter._follow_clock = lambda: None  # type: ignore[method-assign]
    limiter.hear("g", {}, [Charge("t", limits, 0, 30)], turn=0, number=1)
    now_s[0] += SILENCE_S + 1
    assert admit(limiter, "t", limits, "another", 1).refused_by is None
    limiter.hear("g", {}, [Charge("t", limits, 0, 30)], turn=1, number=1)
    assert limiter._quotas("t", limits)["output_tokens_per_minute"].remaining == 70
    now_s[0] += FORGET_S + 1
    limiter.hear("new", {}, turn=0)
    assert list(limiter._gateway_by_name) == ["new"]


def test_charges_that_the_store_did_not_take_are_counted_when_they_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were taken for counted: of those that were sent while the store restarted, the first and all behind it were
    never counted."""
    server = fakeredis.FakeServer()
    pool = fakeredis.FakeRedis(server=server).connection_pool
    monkeypatch.setattr(limiter_module, "storage_from_string", partial(storage_from_string, connection_pool=pool))
    limiter, count = Limiter("redis://localhost:6379"), Limiter._count

    def lose_the_store(limiter: Limiter, use: limiter_module._Use) -> None:
        count(limiter, use)
        server.connected = False

    charges = [Charge("t", LIMITS, 20, 0), Charge("t", LIMITS, -5, 30)]
    with monkeypatch.context() as patch:
        patch.setattr(Limiter, "_count", lose_the_store)
        with pytest.raises(StorageError):
            limiter.hear("g", {}, charges, turn=next(_turns), number=1)
    server.connected = True
    for _ in range(2):
        limiter.hear("g", {}, charges, turn=next(_turns), number=1)
    quotas = admit(limiter, "t", LIMITS, "g", 1).quotas
    assert (quotas["input_tokens_per_minute"].remaining, quotas["output_tokens_per_minute"].remaining) == (84, 20)


def test_a_gateway_knows_best_what_has_ended_there() -> None:
    limiter, limits = Limiter(), TenantLimits(concurrent_requests=1)
    for turn in range(20):
        # One after the other, of whose ends nothing else is heard.
        assert refused_by(limiter, limits, "g", turn) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_words_that_overtake_each_other_let_in_as_many_as_there_are_places(order: tuple[int, ...]) -> None:
    limiter, limits = Limiter(), TenantLimits(concurrent_requests=2)

    def ask(turn: int) -> str | None:
        # All are asked for before the first answer.
        running = Running(0, frozenset(range(turn + 1)))
        return limiter.admit("t", limits, "g", 1, running=running, turn=turn).refused_by

    found = [ask(turn) for turn in order]
    assert found.count(None) == 2
    assert limiter.num_running("t") == 2
    limiter.hear("g", {}, turn=-1)
    assert limiter.num_running("t") == 2
    limiter.hear("g", {"t": Running(1, frozenset([9]))}, turn=9)
    assert limiter.num_running("t") == 1


def test_a_refusal_of_what_has_ended_already_makes_no_place() -> None:
    """A request whose client left while its admission was under way: the gateway's next word came first."""
    limiter, limits = Limiter(), TenantLimits(requests_per_minute=1)
    assert refused_by(limiter, limits, "another", 0) is None
    limiter.hear("g", {}, turn=1)
    assert refused_by(limiter, limits, "g", 0) == "requests_per_minute"
    assert limiter.num_running("t") == 1


def test_an_admission_that_was_given_up_before_it_arrived_takes_no_place() -> None:
    limiter, limits = Limiter(), TenantLimits(concurrent_requests=1)
    limiter.hear("g", {}, turn=1)
    refused_by(limiter, limits, "g", 0)
    assert limiter.num_running("t") == 0
    assert refused_by(limiter, limits, "g", 2) is None


def test_a_word_about_another_tenant_that_overtakes_an_admission_leaves_it_counted() -> None:
    """It was not counted until the gateway's next report."""
    limiter, limits = Limiter(), TenantLimits(concurrent_requests=1)
    limiter.admit("another", limits, "g", 1, running=Running(0, frozenset([2])), turn=2)
    assert refused_by(limiter, limits, "g", 1) is None
    assert limiter.num_running("t") == 1


def test_what_was_refused_leaves_nothing_behind() -> None:
    """The requests that were asked for beside it counted as running until the gateway's next report, for other gateways
    as well."""
    limiter, limits = Limiter(), TenantLimits(concurrent_requests=4)
    for turn in range(9):
        running = Running(0, frozenset(range(9)))
        refused = limiter.admit("t", limits, "g", 1, running=running, turn=turn, num_answers=3).refused_by
        assert refused == (None if turn == 0 else "concurrent_requests")
    assert limiter.num_running("t") == 3
    assert refused_by(limiter, limits, "another", 0) is None


@given(
    st.lists(st.tuples(st.sampled_from(["admit", "charge"]), st.integers(0, 40)), max_size=40),
    st.integers(1, 10),
    st.integers(1, 60),
)
@settings(max_examples=80, deadline=None)
def test_no_window_admits_more_than_its_limit(uses: list[tuple[str, int]], requests: int, tokens: int) -> None:
    limiter = Limiter()
    limits = TenantLimits(requests_per_minute=requests, output_tokens_per_minute=tokens)
    num_admitted = num_output = 0
    for kind, amount in uses:
        if kind == "charge":
            charge(limiter, Charge("t", limits, 0, amount))
            num_output += amount
        elif admit(limiter, "t", limits, "g", amount).refused_by is None:
            assert num_output < tokens
            num_admitted += 1
        else:
            assert num_admitted == requests or num_output >= tokens
    assert num_admitted <= requests


def test_the_tokens_of_an_answer_are_counted_as_it_ends_and_not_before(limiter: Limiter) -> None:
    begun = admit(limiter, "ends", LIMITS, "g", 7).quotas
    assert (begun["output_tokens_per_minute"].remaining, begun["input_tokens_per_minute"].remaining) == (50, 93)
    charge(limiter, Charge("ends", LIMITS, 2, 9))
    later = admit(limiter, "ends", LIMITS, "g", 1).quotas
    assert (later["output_tokens_per_minute"].remaining, later["input_tokens_per_minute"].remaining) == (41, 90)


def test_what_was_counted_and_not_used_is_given_back(limiter: Limiter) -> None:
    """A prompt that was refused for its length took a whole window of its tenant."""
    admit(limiter, "refused", LIMITS, "g", 5000)
    charge(limiter, Charge("refused", LIMITS, -5000, 0))
    assert admit(limiter, "refused", LIMITS, "g", 30).quotas["input_tokens_per_minute"].remaining == 70
    # Of a window that has ended: it makes no credit.
    charge(limiter, Charge("refused", LIMITS, -5000, 0))
    assert admit(limiter, "refused", LIMITS, "g", 30).quotas["input_tokens_per_minute"].remaining == 70
