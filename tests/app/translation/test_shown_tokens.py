"""The log-probabilities and token ids of a chat, however its answer is cut into pieces.

Hidden reasoning was told token by token in `logprobs.content` and `token_ids`, and where it was shown,
`logprobs.content` began with its tokens instead of the content's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.schemas.chat import ChatCompletionRequest, Message
from app.translation.chunks import ChatFrames
from app.translation.render import ResponseHead, chat_completion
from app.translation.streaming import Answer, ChoiceEvent, joined_calls
from deployments.answer_events import EndReason, Finished, Started, TextDelta
from deployments.gateway.answer_shape import AnswerParts
from deployments.stream.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, SIGN_BY_MARK, START, HarmonyParts
from deployments.stream.reasoning import THINK, ReasoningSplit
from tests.app.translation.test_blocks import CALL as TAGGED_CALL
from tests.app.translation.test_blocks import deltas_of, parts_of_answer

HEAD = ResponseHead(response_id="chatcmpl-1", created_s=2, model="m")
STARTED = Started(num_prompt_tokens=3, num_cached_tokens=0)
FINISHED = Finished(reason=EndReason.STOP, num_prompt_tokens=3, num_completion_tokens=9, num_cached_tokens=0)
CUTS = st.sets(st.integers(1, 20))
SIGNS = [SIGN_BY_MARK[mark] for mark in (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)]


def asked(**fields: Any) -> ChatCompletionRequest:
    message = Message(role="user", content="?")
    return ChatCompletionRequest(model="m", messages=[message], logprobs=True, return_token_ids=True, **fields)


def told(deltas: Sequence[TextDelta], **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the whole body of an answer, its choice, and the joined choice of its stream."""
    answer = Answer(
        "".join(delta.text for delta in deltas),
        FINISHED,
        STARTED,
        scores=tuple(score for delta in deltas for score in delta.scores),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=joined_calls(call for delta in deltas for call in delta.calls),
        deltas=deltas,
    )
    body = chat_completion(HEAD, [answer], asked(**fields), None).model_dump_json()
    frames = ChatFrames(HEAD, asked(**fields))
    streamed: dict[str, Any] = {"content": "", "scores": [], "token_ids": [], "reasoning": ""}
    for delta in deltas:
        for frame in filter(None, frames.event(ChoiceEvent(0, delta)).decode().split("\n\n")):
            (choice,) = json.loads(frame.removeprefix("data: "))["choices"]
            scores = (choice["logprobs"] or {"content": []})["content"]
            assert not scores or "reasoning_content" not in choice["delta"]
            streamed["content"] += choice["delta"].get("content", "")
            streamed["reasoning"] += choice["delta"].get("reasoning_content", "")
            streamed["scores"] += scores
            streamed["token_ids"] += choice.get("token_ids", ())
    return body, json.loads(body)["choices"][0], streamed


def spelled(scores: Sequence[dict[str, Any]]) -> str:
    return b"".join(bytes(score["bytes"]) for score in scores).decode()


@pytest.mark.parametrize("hides", [True, False, None])
@given(cuts=CUTS)
def test_the_scores_of_a_chat_are_those_of_its_content_whether_its_reasoning_is_shown_or_not(
    hides: bool | None, cuts: set[int]
) -> None:
    tokens: list[str | bytes] = ["<th", "ink>", "\n", "Hm", " so", "\n", "</", "think>", "\n\n"]
    num_hidden = len(tokens)
    tokens += [b"\xf0\x9f", b"\x98\x80", " it", " </think>", " is"]
    deltas = deltas_of(tokens, cuts, parts=AnswerParts(ReasoningSplit(THINK, has_begun=False)))
    body, whole, streamed = told(deltas, include_reasoning=None if hides is None else not hides)
    assert whole["message"]["content"] == streamed["content"] == "😀 it </think> is"
    assert spelled(whole["logprobs"]["content"]) == whole["message"]["content"]
    assert streamed["scores"] == whole["logprobs"]["content"]
    expected = list(range(num_hidden if hides else 0, len(tokens)))
    assert whole["token_ids"] == streamed["token_ids"] == expected
    assert ("Hm" in body) == (streamed["reasoning"] == "Hm so") == (not hides)


@given(cuts=CUTS)
def test_nothing_is_told_of_an_answer_that_ends_within_hidden_reasoning(cuts: set[int]) -> None:
    deltas = deltas_of(
        ["<think>", "Hm", " ", "so", "</"], cuts, parts=AnswerParts(ReasoningSplit(THINK, has_begun=False))
    )
    _, whole, streamed = told(deltas, include_reasoning=False)
    assert (whole["logprobs"]["content"], whole["token_ids"], whole["message"]["content"]) == ([], [], "")
    assert not any(streamed.values())


@given(cuts=CUTS)
def test_the_tokens_of_calls_are_told_and_those_of_the_reasoning_before_them_are_not(cuts: set[int]) -> None:
    tokens = ["<think>", "Hm", "</think>", "\n", *TAGGED_CALL]
    _, whole, streamed = told(deltas_of(tokens, cuts, parts=parts_of_answer()), include_reasoning=False)
    assert whole["message"]["tool_calls"]
    assert spelled(whole["logprobs"]["content"]) == "".join(TAGGED_CALL)
    assert streamed["scores"] == whole["logprobs"]["content"]
    assert whole["token_ids"] == streamed["token_ids"] == list(range(4, len(tokens)))


@given(cuts=CUTS)
def test_of_messages_the_content_and_the_arguments_are_told(cuts: set[int]) -> None:
    start, channel, constrain, message, end, call = SIGNS
    tokens = [
        *(
            channel,
            "analysis",
            message,
            "Hm",
            "!",
            end,
            start,
            "assistant",
            channel,
            "final",
            message,
            "It",
            " is",
            end,
        ),
        *(start, "assistant", channel, "commentary to=functions.f ", constrain, "json", message, "{}", call),
    ]
    _, whole, streamed = told(deltas_of(tokens, cuts, parts=HarmonyParts(["f"])), include_reasoning=False)
    assert whole["message"]["content"] == "It is"
    assert spelled(whole["logprobs"]["content"]) == "It is{}"
    assert streamed["scores"] == whole["logprobs"]["content"]
    assert [tokens[place] for place in whole["token_ids"]] == ["It", " is", "{}"]
    assert streamed["token_ids"] == whole["token_ids"]


@given(cuts=CUTS)
def test_the_ids_of_half_characters_are_told_without_log_probabilities_too(cuts: set[int]) -> None:
    tokens = ["<think>", "Hm", "</think>", b"\xf0\x9f", b"\x98\x80", " it"]
    parts = AnswerParts(ReasoningSplit(THINK, has_begun=False))
    deltas = deltas_of(tokens, cuts, parts=parts, is_scored=False)
    assert [token_id for delta in deltas for token_id in delta.shown_ids] == [3, 4, 5]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(len(tokens)))
