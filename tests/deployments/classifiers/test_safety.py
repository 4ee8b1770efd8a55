"""Texts of concurrent callers share forward passes, and each caller gets their own verdicts and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.answer_events import Verdict
from deployments.batched_model import MAX_CALL_S
from deployments.classifiers.safety import Safety
from deployments.config import SafetyConfig
from deployments.handle_calls import unwrap
from deployments.siblings import BATCH_TIME
from engine.errors import EngineError, OverloadError, RequestError


class EchoClassifier:
    """Flags what contains "bad", notes its batches, and can be held in the middle of one."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def check(self, text: str, *, field: str) -> None:
        if text == "unreadable":
            raise RequestError("no", field=field)

    def pieces(self, text: str) -> list[str]:
        return text.split("|")

    def judge(self, texts: Sequence[str]) -> list[Verdict]:
        self.batches.append(list(texts))
        self.gate.wait(30)
        return [Verdict(score_by_hazard={}, flagged=("bad",) if "bad" in text else ()) for text in texts]


def local(classifier: EchoClassifier, **options: Any) -> Safety:
    config = SafetyConfig(model_path="unused", max_batch=8)
    return Safety(config, classifier, **options)  # type: ignore[arg-type]


async def verdicts_of(safety: Safety, texts: Sequence[str]) -> list[Verdict]:
    found = await safety.judge(texts)
    assert not isinstance(found, OverloadError)
    return found


async def test_callers_share_forward_passes_and_get_their_own_verdicts() -> None:
    classifier = EchoClassifier()
    safety = local(classifier)
    answers = await asyncio.gather(*(verdicts_of(safety, [f"text {i}", f"bad {i}"]) for i in range(4)))
    assert all([verdict.flagged for verdict in answer] == [(), ("bad",)] for answer in answers)
    assert sorted(text for batch in classifier.batches for text in batch) == sorted(
        f"{kind} {i}" for kind in ("text", "bad") for i in range(4)
    )
    assert len(classifier.batches) < 8


async def test_a_text_that_cannot_be_judged_is_refused_before_it_shares_a_batch() -> None:
    classifier = EchoClassifier()
    safety = local(classifier)
    answers = await asyncio.gather(safety.judge(["fine"]), safety.judge(["unreadable"]), return_exceptions=True)
    assert isinstance(answers[1], RequestError)
    assert not isinstance(answers[0], BaseException)
    assert classifier.batches == [["fine"]]


async def test_of_several_texts_the_one_that_cannot_be_judged_is_named() -> None:
    safety = local(EchoClassifier())
    for texts, field in ((["unreadable"], "input"), (["fine", "unreadable"], "input[1]")):
        with pytest.raises(RequestError) as refused:
            await safety.judge(texts)
        assert refused.value.field == field


async def test_a_long_text_is_judged_in_pieces_and_counts_as_its_worst() -> None:
    classifier = EchoClassifier()
    safety = local(classifier)
    verdicts = await verdicts_of(safety, ["fine|bad|fine", "fine", "", "bad"])
    assert [verdict.flagged for verdict in verdicts] == [("bad",), (), (), ("bad",)]
    assert classifier.batches == [["fine", "bad", "fine", "fine", "", "bad"]]


async def test_a_running_answer_waits_for_one_window_of_a_long_text() -> None:
    """It waited for four windows of 256 tokens, an eighth of a second on an idle core: streams paused with each."""
    classifier = EchoClassifier()
    safety = local(classifier)
    window = "x" * 8 * 256
    classifier.gate.clear()
    long_text = asyncio.create_task(safety.judge(["|".join([window] * 8)]))
    while not classifier.batches:
        await asyncio.sleep(0.001)
    answer = asyncio.create_task(safety.judge(["an answer"], is_urgent=True))
    await asyncio.sleep(0)
    classifier.gate.set()
    await asyncio.gather(long_text, answer)
    assert classifier.batches[:2] == [[window], ["an answer"]]


async def test_a_forward_pass_that_does_not_end_is_ill_health() -> None:
    classifier, now_s = EchoClassifier(), [1000.0]
    safety = local(classifier, clock=lambda: now_s[0])
    assert await safety.trouble() is None
    classifier.gate.clear()
    task = asyncio.create_task(safety.judge(["slow"]))
    while not classifier.batches:
        await asyncio.sleep(0.001)
    now_s[0] += MAX_CALL_S
    safety.check_health()
    now_s[0] += 1
    assert "61 seconds" in (await safety.trouble() or "")
    with pytest.raises(EngineError, match="61 seconds"):
        safety.check_health()
    classifier.gate.set()
    await task
    assert await safety.trouble() is None


async def test_what_cannot_be_judged_in_time_is_refused_by_an_answer_and_no_error() -> None:
    """Serve logs the traceback of each error that a replica raises."""
    safety = local(EchoClassifier())
    safety._pace.note(1, 3600.0)
    first, refused = await asyncio.gather(safety.judge(["first"]), safety.judge(["later text"]))
    assert not isinstance(first, OverloadError)
    assert isinstance(refused, OverloadError)
    assert (refused.retry_after_s > 3600, refused.reason) == (True, BATCH_TIME)


def test_an_error_that_nobody_wrapped_stays_as_it_is() -> None:
    error = ValueError("plain")
    assert unwrap(error) is error
