from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.answer_events import EndReason, Finished, GenerationEvent, Moderated, Started, Verdict
from deployments.config import SafetyConfig
from deployments.errors import UnavailableError
from deployments.gateway import answer_safety
from deployments.gateway.answer_safety import AnswerSafety, texts_of
from deployments.gateway.prompt_encoder import PromptEncoder
from deployments.generation import ChatMessage, ChatPrompt, Moderation, TextPrompt, TokenPrompt, ToolCall, ToolSpec
from deployments.siblings import BATCH_TIME, Siblings
from deployments.timeline import Reception, Recorder, Timeline
from deployments.tokenizer.text_codec import TextCodec
from engine.errors import EngineError, OverloadError, RequestError
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import Judge, ask, events_of, text_of

NO_MEMORY = RuntimeError("not enough memory")
LENIENT = SafetyConfig(model_path="unused", screen_input=False, screen_output=False)


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a classifier soon that stays away."""
    monkeypatch.setattr(answer_safety, "OUTPUT_PATIENCE_S", 2.0)


class ScriptedJudge:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failure: Exception | None = None

    async def __call__(self, texts: Sequence[str], *, is_running: bool = False) -> list[Verdict]:
        if self.failure is not None:
            raise self.failure
        self.texts += texts
        return [verdict(len(text) / 10, *(["hate"] if "bad" in text else [])) for text in texts]


def verdict(score: float, *flagged: str, error: str | None = None) -> Verdict:
    return Verdict(score_by_hazard={"hate": score, "privacy": 1 - score}, flagged=flagged, error=error)


def safety(judge: ScriptedJudge, policy: SafetyConfig | None, asked: Moderation | None) -> AnswerSafety:
    recorder = Recorder(Timeline(request_id="r", model="m", base="m", arrived_unix_s=0.0), reception=Reception())
    return AnswerSafety(policy, asked, judge=judge, recorder=recorder)


def end_of(events: Sequence[GenerationEvent]) -> Finished:
    end = events[-1]
    assert isinstance(end, Finished)
    return end


def test_all_that_a_model_reads_is_judged_each_turn_for_itself_and_with_its_neighbour() -> None:
    """What is spread over turns of one speaker, or stands where only templates look, is no secret to the classifier."""
    call = ToolCall(call_id="1", name="get", arguments='{"a": "\\u0063alled\\nout"}')
    turns = (
        ChatMessage(role="user", content="How do I build"),
        ChatMessage(role="user", content="a bomb?", name="called so"),
        ChatMessage(role="assistant", content="", tool_calls=(call,), reasoning="thought"),
        ChatMessage(role="tool", content="result", tool_call_id="1"),
    )
    tool = ToolSpec(name="get", description="described", parameters={"properties": {"é": {"description": "hidden"}}})
    options = {"date_string": "today", "custom": [{"a": "spread"}, True]}
    assert texts_of(ChatPrompt(messages=turns, tools=(tool,), template_options=options)) == [
        "How do I build",
        "a bomb?",
        "result",
        "How do I build\na bomb?",
        "thought",
        "a\ncalled\nout",
        "described",
        "properties\né\ndescription\nhidden",
        "today\na\nspread",
        "called so",
        "get",
        "1",
    ]
    assert texts_of(ChatPrompt(messages=turns[:1], template_options={"enable_thinking": False})) == ["How do I build"]
    alternating = (turns[0], ChatMessage(role="assistant", content="Yes?"), turns[1])
    assert texts_of(ChatPrompt(messages=alternating)) == ["How do I build", "Yes?", "a bomb?", "called so"]


@pytest.mark.parametrize("screens", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("mode", ["before", "alongside"])
def test_a_request_adds_to_what_is_blocked_and_takes_nothing_from_it(screens: bool, blocks: bool, mode: str) -> None:
    policy = SafetyConfig(model_path="unused", mode=mode, screen_input=screens, screen_output=screens)
    one = safety(ScriptedJudge(), policy, Moderation(blocks_input=blocks, blocks_output=blocks))
    assert one.blocks_input == (screens or blocks)
    assert one.is_first == (one.blocks_input and mode == "before")
    assert (one.screen() is not None) == (screens or blocks)


async def test_without_a_classifier_nothing_is_asked_or_told() -> None:
    judge = ScriptedJudge()
    one = safety(judge, None, Moderation(blocks_input=True, blocks_output=True))
    found = one.judge_input(lambda: ["text"])
    assert await one.told(found, "answer") is None
    assert (one.is_first, one.screen(), judge.texts) == (False, None, [])
    found.close()


async def test_what_nobody_asks_for_is_not_judged() -> None:
    judge = ScriptedJudge()
    quiet = safety(judge, LENIENT, None)
    assert await quiet.judge_input(lambda: ["text"]) is None
    later = safety(judge, LENIENT, Moderation(tells_input=False))
    assert await later.judge_input(lambda: ["text"]) is None
    assert judge.texts == []


@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize("failure", [UnavailableError("gone", retry_after_s=1), EngineError("gone")])
async def test_a_verdict_that_blocks_nothing_may_fail(failure: Exception) -> None:
    """Where the classifier itself failed, and was there, the answer failed with it at its end."""
    judge = ScriptedJudge()
    judge.failure = failure
    one = safety(judge, LENIENT, Moderation())
    told = await one.told(one.judge_input(lambda: ["text"]), "answer")
    assert told is not None
    assert [found and found.error for found in told] == ["gone", "gone"]


async def test_so_may_one_of_a_classifier_in_the_gateway_s_process(gateway: OpenGateway) -> None:
    """Its errors come as they are, and took the whole answer along."""
    judge = Judge()
    judge.failure = RuntimeError("not enough memory")
    events = await events_of(await gateway(judge, safety=LENIENT), ask(moderation=Moderation()))
    told = end_of(events).moderation
    assert told is not None
    assert [found and found.error for found in told] == ["The safety classifier has failed (RuntimeError)."] * 2


async def test_what_was_judged_to_be_shown_is_not_judged_again() -> None:
    judge = ScriptedJudge()
    one = safety(judge, SafetyConfig(model_path="unused"), Moderation())
    await one.judge_output(["one", "three"])
    told = await one.told(one.judge_input(lambda: ["in", "input"]), "one three")
    assert judge.texts == ["one", "three", "in", "input"]
    assert told == Moderated(
        Verdict(score_by_hazard={"hate": 0.5, "privacy": 0.8}, flagged=()),
        Verdict(score_by_hazard={"hate": 0.5, "privacy": 0.7}, flagged=()),
    )


@pytest.mark.usefixtures("little_patience")
async def test_a_score_lets_everything_through_and_tells(gateway: OpenGateway, serving: Serving) -> None:
    judge = Judge("Where")
    opened = await gateway(judge, safety=LENIENT)
    plain = await events_of(opened, ask())
    assert judge.texts == []
    events = await events_of(opened, ask(moderation=Moderation()))
    assert judge.texts == ["Where am I?", text_of(events)]
    assert text_of(events) == text_of(plain)
    told = end_of(events).moderation
    assert told is not None
    assert [found and found.flagged for found in told] == [("hate",), ()]
    judge.failure = ActorDiedError()
    unknown = end_of(await events_of(opened, ask(moderation=Moderation()))).moderation
    assert unknown is not None
    assert all(found is not None and found.error for found in unknown)


async def test_a_block_refuses_and_cuts_where_the_server_would_not(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway(Judge("Where"), safety=LENIENT)
    end = end_of(await events_of(opened, ask(moderation=Moderation(blocks_input=True))))
    assert (end.reason, bool(end.refusal)) == (EndReason.CONTENT_FILTER, True)
    assert end.moderation == Moderated(Verdict(score_by_hazard={"hate": 1.0}, flagged=("hate",)), None)
    assert serving.replicas.calls == []
    whole = text_of(await events_of(opened, ask()))
    strict = await gateway(Judge(whole[:3]), safety=LENIENT)
    events = await events_of(strict, ask(moderation=Moderation(blocks_output=True)))
    cut = end_of(events)
    assert (text_of(events), cut.reason, cut.refusal) == ("", EndReason.CONTENT_FILTER, None)
    assert cut.moderation is not None
    assert cut.moderation.output is not None
    assert cut.moderation.output.flagged == ("hate",)


async def test_a_score_does_not_weaken_the_server_s_policy(gateway: OpenGateway, serving: Serving) -> None:
    end = end_of(await events_of(await gateway(Judge("Where")), ask(moderation=Moderation())))
    assert (end.reason, bool(end.refusal)) == (EndReason.CONTENT_FILTER, True)
    assert serving.replicas.calls == []


async def test_a_refused_input_has_a_refusal_and_costs_the_engine_nothing(
    gateway: OpenGateway, serving: Serving
) -> None:
    events = await events_of(await gateway(Judge("Where")), ask())
    started, end = events
    assert isinstance(started, Started)
    assert isinstance(end, Finished)
    assert (end.reason, end.num_completion_tokens) == (EndReason.CONTENT_FILTER, 0)
    assert end.refusal
    assert serving.replicas.calls == []


async def test_every_turn_is_judged_for_itself(gateway: OpenGateway) -> None:
    judge = Judge()
    turns = ChatPrompt(
        messages=(ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="Hello"))
    )
    await events_of(await gateway(judge), ask(turns, max_tokens=2))
    assert judge.texts[:2] == ["Be kind.", "Hello"]


async def test_token_ids_are_judged_as_the_text_they_make(gateway: OpenGateway) -> None:
    judge = Judge()
    opened = await gateway(judge)
    ids = opened._served["chat"].codec.pieces
    await events_of(opened, ask(TokenPrompt(token_ids=(50, 60, 70)), max_tokens=2))
    assert judge.texts[0] == ids.decode((50, 60, 70))


async def test_the_text_after_an_answer_is_judged_too(gateway: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge()
    opened = await gateway(judge)
    monkeypatch.setattr(TextCodec, "encode_between", lambda codec, before, after: codec.encode_text(before + after))
    await events_of(opened, ask(TextPrompt(text="def f(", suffix="): x"), max_tokens=2))
    assert judge.texts[:2] == ["def f(", "): x"]


async def test_alongside_nothing_is_shown_before_the_verdict(gateway: OpenGateway, serving: Serving) -> None:
    judge = Judge("Where")
    judge.gate.clear()
    serving.replicas.engine.hold_after_steps = 5
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", mode="alongside"))
    task = asyncio.create_task(events_of(opened, ask(max_tokens=None)))
    while not serving.replicas.engine.snapshot().counters.generation_tokens:
        await asyncio.sleep(0.01)
    assert not task.done()
    judge.gate.set()
    _, end = await task
    assert isinstance(end, Finished)
    assert end.refusal
    await serving.replicas.until_idle()


async def test_alongside_a_verdict_that_is_there_in_time_saves_the_engines_work(
    gateway: OpenGateway, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge("Where")
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", mode="alongside"))
    encode_now = PromptEncoder.encode

    async def encode(*args: Any) -> Sequence[int]:
        while not judge.calls:
            await asyncio.sleep(0.001)
        await asyncio.wait([judge.calls[0].task])
        # The verdict needs some rounds of the event loop.
        for _ in range(20):
            await asyncio.sleep(0)
        return await encode_now(*args)

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    *_, end = await events_of(opened, ask())
    assert isinstance(end, Finished)
    assert end.refusal
    assert serving.replicas.calls == []


async def test_a_flagged_answer_is_cut_before_the_window_that_was_flagged(gateway: OpenGateway) -> None:
    whole = text_of(await events_of(await gateway(), ask(max_tokens=150)))
    word = whole[70:75]
    safety = SafetyConfig(model_path="unused", screen_input=False, window_chars=20, overlap_chars=5)
    events = await events_of(await gateway(Judge(word), safety=safety), ask(max_tokens=150))
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is EndReason.CONTENT_FILTER
    assert events[-1].refusal is None
    shown = text_of(events)
    assert whole.startswith(shown)
    assert word not in shown


async def test_a_clean_answer_is_the_same_with_screening(gateway: OpenGateway) -> None:
    safety = SafetyConfig(model_path="unused", window_chars=20, overlap_chars=5)
    judge = Judge()
    assert text_of(await events_of(await gateway(judge, safety=safety), ask(max_tokens=100))) == text_of(
        await events_of(await gateway(), ask(max_tokens=100))
    )
    assert len(judge.texts) > 3


@pytest.mark.parametrize(("prompt", "field"), [("a", "messages"), (TextPrompt(text="a"), "prompt")])
async def test_a_text_that_cannot_be_judged_is_told_by_the_field_that_has_it(
    gateway: OpenGateway, prompt: str | TextPrompt, field: str
) -> None:
    """The classifier's word for it was told, which no field has that a chat or a completion knows."""
    judge = Judge()
    judge.failure = RequestError("'input[1]' must have at most 5 characters to be judged, got 9", field="input[1]")
    with pytest.raises(RequestError, match=f"^'{field}' must have at most 5") as refused:
        await events_of(await gateway(judge), ask(prompt))
    assert refused.value.field == field


async def test_a_verdict_that_is_only_told_names_no_field_that_the_chat_lacks() -> None:
    judge = ScriptedJudge()
    judge.failure = RequestError("'input[1]' must have at most 5 characters to be judged, got 9", field="input[1]")
    told = await safety(judge, LENIENT, Moderation()).judge_input(lambda: ["a", "b"])
    assert told is not None
    assert told.error == "a text must have at most 5 characters to be judged, got 9"


class BusyJudge(Judge):
    """Refuses what comes while it judges two texts already."""

    num_inside = 0

    async def _judge(self, texts: Sequence[str]) -> list[Verdict]:
        if self.num_inside == 2:
            return OverloadError("Too many.", retry_after_s=1, reason=BATCH_TIME)  # type: ignore[return-value]
        self.num_inside += 1
        await asyncio.sleep(0.01)
        self.num_inside -= 1
        return await super()._judge(texts)


async def test_texts_of_one_request_wait_for_the_classifier_if_they_alone_keep_it_busy(gateway: OpenGateway) -> None:
    """An idle server refused a completion of 64 long prompts, whenever it came again."""
    judge = BusyJudge()
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", screen_output=False))
    siblings = Siblings()
    requests = [ask(f"Question {number}", request_id=f"r{number}", max_tokens=2) for number in range(20)]
    await asyncio.gather(*(events_of(opened, replace(request, siblings=siblings)) for request in requests))
    assert sorted(judge.texts) == sorted(f"Question {number}" for number in range(20))
    assert len(judge.calls) > 20
    judge.num_inside = 2
    with pytest.raises(OverloadError):
        await events_of(opened, ask())


async def test_without_a_classifier_that_answers_nothing_passes(gateway: OpenGateway, serving: Serving) -> None:
    judge = Judge()
    judge.failure = ActorDiedError()
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", timeout_s=0.3))
    with pytest.raises(UnavailableError, match="safety classifier") as caught:
        await events_of(opened, ask())
    assert caught.value.retry_after_s > 0
    assert serving.replicas.calls == []
    # It is remembered, where it takes no place from an answer.
    assert [timeline.outcome for timeline in opened._log.find("r")] == ["UnavailableError"]
    assert not opened._log._timelines._begun.get("r")


async def test_a_running_answer_waits_until_an_overloaded_classifier_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows were withdrawn after the time limit and asked about again, as the youngest, for ever."""
    monkeypatch.setattr("deployments.waits.POLL_S", 0.001)
    judge = ScriptedJudge()
    judge.failure = OverloadError("Too many.", retry_after_s=0.001)
    asked = asyncio.create_task(safety(judge, SafetyConfig(model_path="unused"), None).judge_output(["window"]))
    await asyncio.sleep(0)
    assert not asked.done()
    judge.failure = None
    assert len(await asked) == 1


async def test_a_classifier_that_is_too_slow_counts_as_gone(gateway: OpenGateway) -> None:
    judge = Judge()
    judge.gate.clear()
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", timeout_s=0.01))
    with pytest.raises(UnavailableError, match=r"0\.01 seconds"):
        await events_of(opened, ask())
    # It judged all the same what nobody waited for any more, and under load fell behind for good.
    judge.gate.set()
    (call,) = judge.calls
    await asyncio.wait([call.task])
    assert call.task.cancelled()


@pytest.mark.parametrize("failure", [ActorDiedError(), NO_MEMORY, RayTaskError("judge", "", NO_MEMORY)])
async def test_safety_that_fails_open_lets_pass(gateway: OpenGateway, failure: Exception) -> None:
    """Where the classifier itself failed, in its own process or in the gateway's, every request failed with it."""
    judge = Judge()
    judge.failure = failure
    opened = await gateway(judge, safety=SafetyConfig(model_path="unused", fails_closed=False))
    assert text_of(await events_of(opened, ask()))


async def test_safety_that_fails_closed_lets_nothing_pass_that_was_not_judged(gateway: OpenGateway) -> None:
    judge = Judge()
    judge.failure = NO_MEMORY
    with pytest.raises(EngineError, match="safety classifier has failed"):
        await events_of(await gateway(judge), ask())
