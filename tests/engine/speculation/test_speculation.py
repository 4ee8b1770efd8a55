"""Whatever is drafted, answers and the cache are those of an engine that drafts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.identity import AdapterDigest
from engine.config import ResolvedConfig
from engine.ports import DraftText
from engine.request import FinishReason, Request
from engine.scheduling.step_costs import StepCosts
from engine.speculation import speculation
from engine.speculation.drafter import Drafter
from engine.speculation.speculation import FIRST_AGREEMENT, Agreement
from engine.step import StepPlan, StepResult
from tests.engine.scheduling.test_scheduler import a_follower, assert_right
from tests.engine.scheduling.test_scheduler_properties import batches, gates, most_steps
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request
from tests.engine.simulated import ExactCosts
from tests.oracles.naive_scheduler import VOCAB_SIZE, answer_alone

pytestmark = pytest.mark.usefixtures("small_tiles")

A, B = AdapterDigest("a"), AdapterDigest("b")
LookUp = Callable[[Request, list[int], int, frozenset[int]], list[int]]


class DraftCosts(ExactCosts):
    """Costs that are known without measuring, those of drafts too."""

    def __init__(self, *, base_s: float = 0.010, row_s: float = 0.0005, draft_token_s: float = 0.0) -> None:
        super().__init__(base_s=base_s, row_s=row_s, token_s=0.0003)
        self._exact_draft_s = draft_token_s

    @property
    def has_decode_steps(self) -> bool:
        return True

    @property
    def draft_token_s(self) -> float:
        return self._exact_draft_s


def drafting(
    patch: pytest.MonkeyPatch,
    harness: Harness,
    look_up: LookUp,
    costs: StepCosts | None = None,
    acceptance: float | None = None,
) -> Harness:
    """Have an engine draft what a function says, from the first step on."""

    class Told(Drafter):
        def __init__(self, request: Request, agreement: float) -> None:
            super().__init__(request, agreement)
            self._request = request

        @property
        def acceptance(self) -> float:
            return super().acceptance if acceptance is None else acceptance

        def look_up(self, output_ids: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:  # type: ignore[override]
            super().look_up(output_ids, count, stop_ids)
            return look_up(self._request, output_ids, count, stop_ids)

    patch.setattr(speculation, "Drafter", Told)
    harness.scheduler._speculation._costs = costs or DraftCosts()
    return harness


answer_of = cache(answer_alone)


def truth(request: Request, output_ids: list[int], count: int, max_model_len: int = 64) -> list[int]:
    """What the answer goes on with."""
    answer = [*request.prior_output_ids, *answer_of(request, max_model_len).token_ids]
    assert answer[: len(output_ids)] == output_ids, "what is known already is another answer"
    return answer[len(output_ids) :][:count]


def right(request: Request, output_ids: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:
    return up_to_an_end(truth(request, output_ids, count), stop_ids)


def up_to_an_end(draft: list[int], stop_ids: frozenset[int]) -> list[int]:
    return draft[: next((at for at, token_id in enumerate(draft) if token_id in stop_ids), len(draft))]


def drafts_of(harness: Harness) -> list[int]:
    return [len(row.draft_ids) for plan in harness.runner.plans for row in plan.rows if row.draft_ids]


@given(batches(), gates(), st.integers(0, 1), st.integers(1, 9), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_draft_whatever_changes_no_answer(
    batch: tuple[ResolvedConfig, list[Request]],
    gate: ScriptedGate,
    steps_ahead: int,
    num_speculative_tokens: int,
    has_few_blocks: bool,
    data: st.DataObject,
) -> None:
    """True ones, false ones, and some that go wrong, among chunks of prompts, pre-emptions, ends and grammars."""
    config, all_requests = batch
    least = config.reach.most(config.max_model_len)
    num_blocks = max(least, config.num_blocks // 2) if has_few_blocks else config.num_blocks
    # Where layers keep states nothing is drafted.
    config = replace(config, num_speculative_tokens=num_speculative_tokens, num_blocks=num_blocks, num_snapshots=0)

    def some(request: Request, output_ids: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:
        draft = truth(request, output_ids, count, config.max_model_len)
        draft += data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=count - len(draft)))
        wrong_at = data.draw(st.integers(0, 2 * len(draft)))
        if wrong_at < len(draft):
            draft[wrong_at] = (draft[wrong_at] + 1) % VOCAB_SIZE
        return up_to_an_end(draft, stop_ids)

    with pytest.MonkeyPatch.context() as patch:
        harness = drafting(patch, Harness(config, gate, steps_ahead=steps_ahead), some, acceptance=0.9)
        harness.add(*all_requests)
        harness.finish(most_steps(all_requests))
    for request in all_requests:
        alone = answer_alone(request, config.max_model_len)
        name = request.request_id
        assert (harness.tokens(name), harness.reason(name)) == (alone.token_ids, alone.reason)
    counters = harness.scheduler.counters
    assert counters.num_draft_tokens == sum(drafts_of(harness)) >= counters.num_accepted_tokens
    assert counters.generation_tokens == sum(len(harness.tokens(request.request_id)) for request in all_requests)


@given(batches(), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_prefix_cache_then_holds_what_it_would_have_held(
    batch: tuple[ResolvedConfig, list[Request]], num_speculative_tokens: int, wrong_every: int
) -> None:
    """But for what a grammar has forced at an answer's end: if it was drafted it is computed, else it is not."""
    config, all_requests = batch
    config = replace(config, enable_prefix_cache=True, num_blocks=2000, num_snapshots=0)
    all_requests = [replace(one, params=replace(one.params, grammar=None)) for one in all_requests]

    def mostly(request: Request, output_ids: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:
        draft = truth(request, output_ids, count, config.max_model_len)
        if wrong_every:
            draft[wrong_every::wrong_every] = [(i + 1) % VOCAB_SIZE for i in draft[wrong_every::wrong_every]]
        return up_to_an_end(draft, stop_ids)

    names = []
    for count in (0, num_speculative_tokens):
        with pytest.MonkeyPatch.context() as patch:
            harness = drafting(patch, Harness(replace(config, num_speculative_tokens=count)), mostly, acceptance=0.9)
            harness.add(*all_requests)
            harness.finish(most_steps(all_requests))
        names.append(set(harness.scheduler._tables._index._block_by_name))
    assert names[0] == names[1]


def test_what_is_right_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = drafting(monkeypatch, Harness(a_config(num_speculative_tokens=8)), right, acceptance=0.9)
    harness.add(a_request("a", max_tokens=20))
    # The prompt, two drafts with the tokens behind them, and one that lacks the last token, which is only drawn.
    assert harness.finish() == 4
    assert drafts_of(harness) == [8, 8]
    assert harness.tokens("a") == answer_alone(a_request("a", max_tokens=20), 64).token_ids
    counters = harness.scheduler.counters
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (2, 16, 16)


def test_no_draft_reaches_beyond_the_answer_s_bound_or_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for request, config in (
        (a_request("a", max_tokens=6), a_config(num_speculative_tokens=9)),
        (a_request("a", max_tokens=60), a_config(num_speculative_tokens=9, max_model_len=10)),
    ):
        harness = drafting(monkeypatch, Harness(config), lambda *asked: [5] * asked[2], acceptance=0.9)
        harness.add(request)
        harness.finish()
        assert harness.reason("a") is FinishReason.LENGTH
        ends = [row.stop for plan in harness.runner.plans for row in plan.rows]
        assert max(ends) == min(3 + request.params.max_tokens, config.max_model_len) - 1


def test_a_draft_takes_what_is_left_of_the_budget_and_no_prompt_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(num_speculative_tokens=8, max_batched_tokens=12)
    harness = drafting(monkeypatch, Harness(config), right, acceptance=0.9)
    harness.add(a_request("a", max_tokens=40))
    harness.step()
    harness.add(a_request("b", range(1, 10), max_tokens=1))
    plan = harness.step()
    assert plan is not None
    assert {row.request.request_id: (row.end - row.start, len(row.draft_ids)) for row in plan.rows} == {
        "a": (1, 2),
        "b": (9, 0),
    }
    harness.finish()


def test_no_draft_is_computed_before_what_a_grammar_has_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is budget, but no more for what is known before it is computed."""
    config = a_config(num_speculative_tokens=4, max_prefill_tokens_with_decodes=2)
    harness = drafting(monkeypatch, Harness(config), right, acceptance=0.9)
    harness.add(a_request("d", max_tokens=20), a_follower("a"), a_follower("b"))
    # The device sees to it that a draft stands behind a token that is drawn from.
    harness.finish()
    assert any(row.end - row.start > 1 and not row.samples for plan in harness.runner.plans for row in plan.rows)
    assert_right(harness, a_follower("a"), a_follower("b"))


def test_a_draft_takes_no_block_that_another_may_need_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would grow beyond the cache, were the other not done by then; blocks are of 4 tokens."""
    config = a_config(num_speculative_tokens=8, num_blocks=10, max_model_len=40, max_batched_tokens=40)
    harness = drafting(monkeypatch, Harness(config), lambda *asked: [5] * asked[2], acceptance=0.9)
    harness.add(a_request("a", range(14), max_tokens=20), a_request("b", range(1, 13), max_tokens=6))
    harness.finish()
    assert max(drafts_of(harness)) == 8
    assert harness.scheduler.counters.num_preemptions == 0


def test_a_token_that_was_only_drawn_is_not_computed() -> None:
    """A row that failed behind its draft has brought no more than the draft."""
    harness = Harness(a_config(num_speculative_tokens=8))
    harness.scheduler._speculation._costs = DraftCosts()
    request = a_request("a", max_tokens=9)
    answer = answer_alone(request, 64).token_ids
    harness.add(replace(request, prediction_ids=answer))
    harness.step()
    plan = harness.scheduler.plan()
    assert plan is not None
    assert plan.rows[0].draft_ids == answer[1:8]
    harness.scheduler.advance(plan)
    result = StepResult(token_ids_by_request={request.request_id: answer[1:4]}, error_by_request={})
    harness.scheduler.commit(plan, result)
    plan = harness.scheduler.plan()
    assert plan is not None
    assert (plan.rows[0].start, plan.rows[0].end) == (3 + 3, 3 + 4)


def draft_lengths(
    patch: pytest.MonkeyPatch, num_rows: int, acceptance: float, costs: DraftCosts, prompt: int = 0
) -> list[int]:
    """The drafts of a step in which so many decode, and a prompt is computed."""
    config = a_config(max_num_seqs=num_rows + 1, num_speculative_tokens=100, max_batched_tokens=1000, num_blocks=5000)
    harness = drafting(patch, Harness(config), lambda *asked: [5] * asked[2], costs, acceptance)
    harness.add(*(a_request(f"{i}", max_tokens=50) for i in range(num_rows)))
    harness.step()
    if prompt:
        harness.add(a_request("late", [7] * prompt))
    plan = harness.step()
    assert plan is not None
    return [len(row.draft_ids) for row in plan.rows if row.start >= 3]


def test_a_draft_is_as_long_as_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: alone, a step of 10.5 ms and 0.5 ms for a token more."""
    costs = DraftCosts(draft_token_s=0.0005)
    for acceptance in (0.02, 0.3, 0.6, 0.9):
        best = max(range(60), key=lambda k: (1 + sum(acceptance**i for i in range(1, k + 1))) / (0.0105 + 0.0005 * k))
        assert draft_lengths(monkeypatch, 1, acceptance, costs) == [min(best, 49)]


def test_in_a_large_batch_a_draft_has_to_be_right_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = DraftCosts(draft_token_s=0.0005)
    lengths = [max(draft_lengths(monkeypatch, rows, 0.6, costs)) for rows in (1, 4, 16, 40)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2
    assert lengths[-1] == 0


def shared_out(
    acceptances: list[float], *, num_rows: int, token_s: float = 0.0005, num_free: int = 1000, length: int = 30
) -> list[int]:
    live = Harness().scheduler._live
    offers = [speculation.Offer(live, [5] * length, acceptance) for acceptance in acceptances]  # type: ignore[arg-type]
    speculation.share_out(offers, 0.01301, token_s, num_rows=num_rows, num_free=num_free)
    return [offer.num_wanted for offer in offers]


def test_the_likeliest_come_first_wherever_they_stand() -> None:
    """One that is not worth a token ends it for all, so that it must not be asked before others."""
    assert shared_out([0.01, 0.5, 0.9], num_rows=3, token_s=0.001, length=4) == [0, 1, 4]
    assert shared_out([0.01, 0.5, 0.9], num_rows=3, num_free=1, token_s=0.001) == [0, 0, 1]


def test_beside_others_drafts_do_not_make_a_step_longer_than_they_may() -> None:
    (alone,) = shared_out([0.99], num_rows=1)
    (beside_others,) = shared_out([0.99], num_rows=3)
    assert alone == 30
    assert beside_others == 13  # of 6.5 ms


def test_where_all_draft_a_step_may_be_as_much_longer_as_it_brings_each_of_them() -> None:
    counts = shared_out([0.99] * 4, num_rows=4)
    assert max(counts) - min(counts) <= 1
    assert sum(counts) > 2 * 13
    # One that has next to no draft would lose.
    assert sum(shared_out([0.99] * 3 + [0.01], num_rows=4)) == 13


def test_the_likeliest_tokens_come_first() -> None:
    likely, unlikely, hopeless = shared_out([0.9, 0.6, 0.01], num_rows=3, num_free=8)
    assert (likely + unlikely, hopeless) == (8, 0)
    assert 0.9**likely > 0.6 ** (unlikely + 1)
    assert 0.6**unlikely > 0.9 ** (likely + 1)


def test_beside_a_prompt_a_step_has_more_room_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = DraftCosts(draft_token_s=0.003)
    assert draft_lengths(monkeypatch, 1, 0.5, costs) < draft_lengths(monkeypatch, 1, 0.5, costs, prompt=60)


def test_who_drafts_nothing_is_asked_for_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that runs ahead waits only where drafts are wanted."""

    def plan_of(count: int) -> StepPlan:
        harness = Harness(a_config(num_speculative_tokens=count))
        harness.add(a_request("a"))
        plan = harness.step()
        assert plan is not None
        return plan

    assert not plan_of(0).needs_results
    assert plan_of(1).needs_results


def test_of_a_prediction_it_is_told_what_the_answer_took_and_what_was_computed_in_vain() -> None:
    request = a_request("a", max_tokens=30)
    answer = answer_alone(request, 64).token_ids
    predicted = (*answer[:10], (answer[10] + 1) % VOCAB_SIZE, *answer[11:])
    harness = Harness(a_config(num_speculative_tokens=8))
    harness.scheduler._speculation._costs = DraftCosts()
    harness.add(replace(request, prediction_ids=predicted))
    harness.finish()
    assert harness.tokens("a") == answer
    told = [(emission.num_accepted, emission.num_rejected) for emission in harness.emissions["a"]]
    assert told == sorted(told)
    counters = harness.scheduler.counters
    assert sum(told[-1]) <= counters.num_draft_tokens
    assert told[-1][0] >= 20
    assert 0 < told[-1][1] <= 8


def test_without_drafts_a_prediction_has_no_effect() -> None:
    request = a_request("a", max_tokens=30)
    answer = answer_alone(request, 64).token_ids
    harness = Harness()
    harness.add(replace(request, prediction_ids=answer))
    harness.finish()
    assert harness.tokens("a") == answer
    assert [(e.num_accepted, e.num_rejected) for e in harness.emissions["a"]] == [(0, 0)] * 30


class ScriptedModel:
    """A draft model that takes no time, and knows what each answer goes on with, or the contrary."""

    max_texts = 2

    def __init__(self, *, is_right: bool = True, token_s: float = 0.0, max_tokens: int = 64) -> None:
        self.max_tokens = max_tokens
        self.token_s = token_s
        self.asked: list[tuple[list[str], int]] = []
        self.num_declined = 0
        self._is_right = is_right

    def draft(self, texts: Sequence[DraftText], count: int, read_s: float) -> list[list[int]]:
        self.asked.append(([text.request.request_id for text in texts], count))
        self.token_s = self.token_s or 0.0001
        drafts = [truth(request, list(output_ids), count) for request, output_ids in texts]
        return [[(i + (not self._is_right)) % VOCAB_SIZE for i in draft] for draft in drafts]

    def decline(self) -> None:
        self.num_declined += 1


def guessing(model: ScriptedModel, **costs: float) -> Harness:
    harness = Harness(a_config(num_speculative_tokens=8, max_batched_tokens=64))
    harness.scheduler._speculation._model = model
    harness.scheduler._speculation._costs = DraftCosts(**costs)
    return harness


def test_what_a_draft_model_guesses_right_saves_steps() -> None:
    model = ScriptedModel()
    harness = guessing(model)
    requests = [a_request(name, prompt, max_tokens=30) for name, prompt in (("a", (1, 2)), ("b", (3, 4)))]
    harness.add(*requests)
    assert harness.finish() < 10
    for request in requests:
        assert harness.tokens(request.request_id) == answer_alone(request, 64).token_ids
    # A little at first, as its cost is not known, and then as much as there are logits for.
    assert model.asked[:2] == [(["a", "b"], 2), (["a", "b"], 5)]


def test_who_guesses_wrong_is_soon_asked_no_more() -> None:
    model = ScriptedModel(is_right=False, token_s=0.002)
    harness = guessing(model, base_s=0.01)
    request = a_request("a", max_tokens=40)
    harness.add(request)
    harness.finish()
    assert harness.tokens("a") == answer_alone(request, 64).token_ids
    assert 0 < len(model.asked) < 8
    assert model.num_declined > 20


def test_what_is_known_of_an_adapter_s_last_answers_holds_for_the_next() -> None:
    model = ScriptedModel(is_right=False, token_s=0.002)
    harness = guessing(model, base_s=0.01)
    for index in range(8):
        harness.add(a_request(f"{index}", max_tokens=40))
        harness.finish()
    harness.add(a_request("other", adapter="b", max_tokens=40))
    harness.finish()
    num_asked = Counter(names[0] for names, _ in model.asked)
    assert num_asked["7"] < num_asked["0"] / 2
    assert num_asked["other"] == num_asked["0"]


def test_a_draft_model_is_not_asked_for_more_texts_than_it_takes_or_what_the_client_predicts() -> None:
    model = ScriptedModel()
    harness = guessing(model)
    harness.add(*(a_request(name, max_tokens=9) for name in "abc"))
    harness.finish()
    assert model.asked == []
    predicted = a_request("d", max_tokens=30)
    harness.add(replace(predicted, prediction_ids=answer_alone(predicted, 64).token_ids), a_request("e", max_tokens=30))
    harness.finish()
    assert {tuple(names) for names, _ in model.asked} == {("e",)}


def test_a_draft_model_is_not_asked_for_texts_that_are_too_long_for_it() -> None:
    """What was hoped for those made it guess for others, however often that was wrong."""
    model = ScriptedModel(max_tokens=20)
    harness = guessing(model)
    harness.add(a_request("short", max_tokens=9), a_request("long", [1] * 16, max_tokens=9))
    harness.finish()
    # The long one has 17 tokens when it is first asked for, and 20 after two right guesses.
    assert model.asked[0] == (["short", "long"], 2)
    assert {tuple(names) for names, _ in model.asked[1:]} == {("short",)}


def test_an_end_that_a_draft_model_guesses_leaves_no_other_draft_in_its_name() -> None:
    """The tokens of that draft, which was the client's prediction, were missing in the usage."""
    answer = answer_alone(a_request("a", max_tokens=40), 64).token_ids
    end = min({*range(VOCAB_SIZE)} - {*answer})
    request = a_request("a", max_tokens=40, stop_token_ids=(end,))
    model = ScriptedModel(token_s=0.0001)
    guess = model.draft

    def right_at_first(texts: Sequence[DraftText], count: int, read_s: float) -> list[list[int]]:
        """It is then believed more than a prediction that was wrong."""
        return guess(texts, 1, read_s) if len(texts[0].output_ids) < 9 else [[end]]

    model.draft = right_at_first  # type: ignore[method-assign]
    harness = guessing(model)
    predicted = tuple((token_id + (at in (1, 4, 7))) % VOCAB_SIZE for at, token_id in enumerate(answer))
    harness.add(replace(request, prediction_ids=predicted))
    harness.finish()
    assert harness.tokens("a") == answer
    told = harness.emissions["a"][-1]
    num_predicted = harness.scheduler.counters.num_draft_tokens - len(model.asked)
    assert told.num_accepted + told.num_rejected == num_predicted > 20


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(0, 3),
    st.floats(0.001, 1),
    st.floats(0, 1),
    st.integers(1, 12),
)
def test_as_much_is_guessed_as_brings_the_most_tokens_per_second(
    acceptances: list[float], num_others: int, step_s: float, token_s: float, most: int
) -> None:
    num_rows = len(acceptances) + num_others
    found = speculation.num_guesses(acceptances, num_rows=num_rows, step_s=step_s, token_s=token_s, most=most)
    assert 0 <= found <= most

    def rate(count: int) -> float:
        expected = [sum(acceptance**power for power in range(count + 1)) for acceptance in acceptances]
        return (sum(expected) + num_others) / (step_s + count * token_s)

    assert all(rate(found) >= rate(count) * (1 - 1e-9) for count in range(found))
    if num_rows == 1:
        assert rate(found) >= max(map(rate, range(most + 1))) * (1 - 1e-9)
    elif num_others:
        # Those who are not guessed for wait no longer than they would for other drafts.
        assert found * token_s <= step_s * speculation.MAX_STRETCH * (1 + 1e-9)


def test_each_adapter_has_its_own_rate_which_is_forgotten_slowly() -> None:
    known = Agreement()
    assert known.first(A) == known.first(None) == FIRST_AGREEMENT
    for _ in range(200):
        known.learn(A, 0.1)
    assert known.first(A) == pytest.approx(0.1, abs=0.05)
    assert known.first(None) == FIRST_AGREEMENT
    # Nothing is guessed for it any more; some answers later, it is tried again.
    rates = [known.first(A) for _ in range(100)]
    assert rates == sorted(rates)
    assert rates[-1] > 0.6


def test_the_adapter_that_was_asked_for_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_ADAPTERS", 2)
    known = Agreement()
    for adapter in (A, B):
        known.first(adapter)
        known.learn(adapter, 0.0)
    low = known.first(A)
    assert low < FIRST_AGREEMENT
    known.first(None)
    known.learn(B, 0.0)
    assert known.first(B) == FIRST_AGREEMENT
    assert known.first(B) == FIRST_AGREEMENT
