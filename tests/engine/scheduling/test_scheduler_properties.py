"""Random arrivals, ends, cache sizes, adapters and priorities. `Harness` checks everything after every operation; here
it is only driven, and what came out is compared with each request computed alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.config import ResolvedConfig
from engine.request import FinishReason, Pooling, Request
from tests.engine.scheduling.test_own_step import teach
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request
from tests.engine.scripted_mover import ScriptedMover
from tests.oracles.naive_scheduler import answer_alone, prompt_scores

STEMS = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9))
ADAPTERS = (None, None, "x", "y", "z", "broken")
pytestmark = pytest.mark.usefixtures("small_tiles", "near_states", "short_steps")

WINDOWS = ((0,), (0,), (0, 3), (0, 5, 5), (4,), (2, 6))
"""Of the cache's tables: most have one that keeps everything."""


@st.composite
def configs(draw: st.DrawFn) -> ResolvedConfig:
    block_tokens = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(12, 24))
    config = a_config(
        max_model_len=max_model_len,
        max_num_seqs=draw(st.integers(1, 5)),
        num_guest_rows=draw(st.integers(0, 2)),
        max_batched_tokens=draw(st.integers(1, 20)),
        block_tokens=block_tokens,
        enable_prefix_cache=draw(st.booleans()),
        max_prefill_tokens_with_decodes=draw(st.none() | st.integers(1, 6)),
        windows=draw(st.sampled_from(WINDOWS)),
    )
    if config.enable_prefix_cache:
        # As for models whose layers keep states: few are kept, so that each is given up for another one.
        config = replace(config, num_snapshots=draw(st.sampled_from([0, 0, 1, 2, 5])))
    most = config.reach.most(max_model_len)
    return replace(config, num_blocks=draw(st.integers(most, 3 * most)))


def gates() -> st.SearchStrategy[ScriptedGate]:
    return st.builds(
        ScriptedGate,
        num_slots=st.integers(1, 3),
        load_steps=st.fixed_dictionaries({name: st.integers(0, 6) for name in "xyz"}),
        errors=st.just({"broken": "The adapter is broken."}),
    )


def movers() -> st.SearchStrategy[ScriptedMover | None]:
    return st.none() | st.builds(
        ScriptedMover,
        st.lists(st.integers(1, 24), min_size=1, max_size=2),
        steps=st.integers(0, 4),
        losing=st.sampled_from([0, 0, 3]),
    )


@st.composite
def requests(draw: st.DrawFn, name: str, max_model_len: int) -> Request:
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(0, 23), max_size=4))
    prompt = (*stem[: draw(st.integers(0, len(stem)))], *tail)[: max_model_len - 1] or (1,)
    max_tokens = draw(st.integers(1, 14))
    # What a grammar forces is taken in one step, but of requests whose tokens may not end or are told one by one.
    grammar = draw(st.sampled_from([None, None, "h", "r"]))
    asks_each = grammar is None or draw(st.booleans())
    adapter = draw(st.sampled_from(ADAPTERS))
    poolings = [*Pooling] if adapter is not None else [Pooling.LAST, Pooling.MEAN]
    pooling = draw(st.sampled_from([None, None, None, *poolings]))
    return a_request(
        name,
        prompt,
        max_tokens=max_tokens,
        grammar=grammar,
        min_tokens=draw(st.integers(0, max_tokens)) if asks_each else 0,
        ignore_eos=asks_each and draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 23), max_size=2))),
        seed=draw(st.integers(0, 3)),
        adapter=adapter,
        adapter_start=draw(st.sampled_from([0, 0, 3, 4, 9])),
        salt=draw(st.sampled_from(["", "", "x"])),
        tenant=draw(st.sampled_from(["", "", "t"])),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1, -(2**31), 2**31 - 1])),
        deadline_s=draw(st.sampled_from([None, None, None, 30.0])),
        pooling=pooling,
        num_prompt_logprobs=draw(st.sampled_from([None, None, None, 0])) if pooling is None else None,
    )


def most_steps(all_requests: list[Request]) -> int:
    """Generous, but a bound: each request alone for every token, as often as any other could have pre-empted it."""
    longest = sum(len(request.prompt_ids) + request.params.max_tokens for request in all_requests)
    return 100 + 2 * longest * (1 + len(all_requests)) + 70 * len(all_requests)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine's life: requests come, are cancelled, run late or fail, while steps go on."""

    @initialize(
        config=configs(),
        gate=gates(),
        steps_ahead=st.integers(0, 1),
        prompt_token_s=st.sampled_from([None, 0.0001, 0.02]),
        mover=movers(),
    )
    def build(
        self,
        config: ResolvedConfig,
        gate: ScriptedGate,
        steps_ahead: int,
        prompt_token_s: float | None,
        mover: ScriptedMover | None,
    ) -> None:
        if config.num_snapshots:
            mover = None  # States are not stored in tiers, which are refused.
        self.now = 0.0
        failing = frozenset({"r3", "r8"})
        self.harness = Harness(config, gate, failing, lambda: self.now, steps_ahead, mover)
        if prompt_token_s is not None:
            # Then some prompts are computed without the decodes, and dear ones without each other.
            teach(self.harness.scheduler.admission.costs, prompt_token_s=prompt_token_s)
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = f"r{len(self.requests)}"
        request = data.draw(requests(name, self.harness.config.max_model_len))
        self.requests[name] = request
        self.harness.add(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.harness.reason(name) is None:
            self.cancelled.add(name)
        self.harness.cancel(name)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: not self.harness.runner.steps_ahead)
    @rule(data=st.data(), count=st.integers(1, 3))
    def step_that_pauses(self, data: st.DataObject, count: int) -> None:
        """Requests come while it is computed; some go before it."""

        def pauses() -> bool:
            nonlocal count
            if count:
                count -= 1
                self.add(data)
                return True
            return False

        self.harness.runner.pauses = pauses
        self.harness.step()

    @rule(seconds=st.sampled_from([1.0, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.finish(most_steps(list(self.requests.values())))
        for name, request in self.requests.items():
            self.check_answer(name, request)

    def check_answer(self, name: str, request: Request) -> None:
        tokens, reason = self.harness.tokens(name), self.harness.reason(name)
        alone = answer_alone(request, self.harness.config.max_model_len)
        assert tokens == alone.token_ids[: len(tokens)], "an answer depends on more than its request"
        scores = [told.logprob for emission in self.harness.emissions[name] for told in emission.prompt_logprobs]
        assert scores == (prompt_scores(request) if tokens else []), "a prompt is scored once, with the first token"
        assert max(emission.num_cached_tokens for emission in self.harness.emissions[name]) < len(request.prompt_ids)
        if reason is FinishReason.CANCELLED:
            assert name in self.cancelled
        elif reason is FinishReason.FAILED:
            assert self.harness.emissions[name][-1].error
            assert request.adapter == "broken" or name in {"r3", "r8"}
        elif reason is FinishReason.EXPIRED:
            assert request.deadline_s is not None
        else:
            assert (tokens, reason) == (alone.token_ids, alone.reason)
            assert self.harness.pooled(name) == alone.pooled


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> tuple[ResolvedConfig, list[Request]]:
    config = draw(configs())
    count = draw(st.integers(1, 7))
    drawn = [draw(requests(f"r{i}", config.max_model_len)) for i in range(count)]
    return config, [request for request in drawn if request.adapter != "broken" and request.deadline_s is None]


@given(batches(), gates())
@settings(max_examples=60, deadline=None)
def test_who_came_with_whom_changes_no_answer_and_how_much_was_cached_is_told_truly(
    batch: tuple[ResolvedConfig, list[Request]], gate: ScriptedGate
) -> None:
    config, all_requests = batch
    harness = Harness(config, gate)
    harness.add(*all_requests)
    harness.finish(most_steps(all_requests))
    for request in all_requests:
        alone = answer_alone(request, config.max_model_len)
        assert (harness.tokens(request.request_id), harness.reason(request.request_id)) == (
            alone.token_ids,
            alone.reason,
        )
        assert harness.pooled(request.request_id) == alone.pooled
        rows = [row for plan in harness.runner.plans for row in plan.rows if row.request is request]
        cached = rows[0].start
        assert {emission.num_cached_tokens for emission in harness.emissions[request.request_id]} == {cached}
        assert config.enable_prefix_cache or cached == 0


@given(batches(), gates(), st.integers(0, 1), st.lists(st.sampled_from("hnprs"), min_size=7, max_size=7))
@settings(max_examples=80, deadline=None)
def test_what_a_grammar_forces_is_taken_at_once_and_changes_no_answer(
    batch: tuple[ResolvedConfig, list[Request]], gate: ScriptedGate, steps_ahead: int, grammars: list[str]
) -> None:
    """All but every third request follow a grammar; blocks are few, so that some are pre-empted in between."""
    config, all_requests = batch
    config = replace(config, num_blocks=max(config.reach.most(config.max_model_len), config.num_blocks // 2))
    all_requests = [
        replace(
            request,
            prompt_ids=request.prompt_ids[:5],
            params=replace(request.params, grammar=grammar, min_tokens=0, ignore_eos=False, max_tokens=18),
            pooling=None,
        )
        if number % 3
        else request
        for number, (request, grammar) in enumerate(zip(all_requests, grammars, strict=False))
    ]
    harness = Harness(config, gate, steps_ahead=steps_ahead)
    harness.add(*all_requests)
    harness.finish(most_steps(all_requests))
    num_tokens = 0
    for request in all_requests:
        alone = answer_alone(request, config.max_model_len)
        name = request.request_id
        assert (harness.tokens(name), harness.reason(name)) == (alone.token_ids, alone.reason)
        num_tokens += len(alone.token_ids)
    counters = harness.scheduler.counters
    assert counters.generation_tokens == num_tokens
    assert counters.forced_tokens == num_tokens - sum(
        len([emission for emission in emissions if emission.token_ids]) for emissions in harness.emissions.values()
    )


@given(batches(), gates())
@settings(max_examples=40, deadline=None)
def test_with_room_for_all_every_request_runs_in_every_step_after_its_first_token(
    batch: tuple[ResolvedConfig, list[Request]], gate: ScriptedGate
) -> None:
    config, all_requests = batch
    # Of one flow: another's may take a row.
    all_requests = [replace(request, adapter=None, tenant="", pooling=None) for request in all_requests]
    config = a_config(
        block_tokens=config.block_tokens,
        max_model_len=24,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        num_blocks=2000,
        windows=config.windows,
    )
    harness = Harness(config, gate)
    harness.add(*all_requests)
    harness.finish(most_steps(all_requests))
    for request in all_requests:
        rows = [(plan.step_id, row) for plan in harness.runner.plans for row in plan.rows if row.request is request]
        decodes = [step_id for step_id, row in rows if row.end >= len(request.prompt_ids)]
        assert decodes == list(range(decodes[0], decodes[0] + len(decodes)))
    assert harness.scheduler.counters.num_preemptions == 0
