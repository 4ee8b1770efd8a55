from __future__ import annotations

import pytest

from app.schemas.completions import CompletionRequest
from app.translation.render import ResponseHead, TextScores, completion, usage
from app.translation.streaming import Answer
from deployments.answer_events import EndReason, Finished, Started, TokenScore


def test_offsets_count_a_character_once_though_several_tokens_spell_it() -> None:
    spelt = "é🙂!".encode()
    scores = [TokenScore(byte, "\ufffd", bytes([byte]), -0.5) for byte in spelt]
    told = TextScores()
    assert told.next(scores[:4]).text_offset == [0, 0, 1, 1]
    assert told.next(scores[4:]).text_offset == [1, 1, 2]


def answer(text: str, logprob: float) -> Answer:
    return Answer(
        text,
        Finished(reason=EndReason.STOP, num_prompt_tokens=5, num_completion_tokens=2, num_cached_tokens=0),
        Started(num_prompt_tokens=5, num_cached_tokens=0, fingerprint="fp"),
        (TokenScore(1, text, text.encode(), logprob),),
    )


@pytest.mark.parametrize(("num_computed", "expected"), [(1, ["a", "b", "c", "d"]), (2, ["b", "c"]), (4, ["c"])])
def test_each_prompt_gets_the_best_of_its_own_answers(num_computed: int, expected: list[str]) -> None:
    answers = [answer("a", -2.0), answer("b", -1.0), answer("c", -0.5), answer("d", -3.0)]
    head = ResponseHead(response_id="r", created_s=7, model="m")
    told = completion(head, answers, CompletionRequest(model="m", prompt="?", best_of=num_computed))
    assert [choice.text for choice in told.choices] == expected
    assert [choice.index for choice in told.choices] == list(range(len(expected)))
    # All that was computed is paid for.
    assert told.usage.completion_tokens == 8
    assert told.usage.total_tokens == told.usage.prompt_tokens + 8


def test_what_became_of_predictions_is_told_of_all_answers_together_and_is_in_no_sum() -> None:
    ends = [
        Finished(
            reason=EndReason.STOP,
            num_prompt_tokens=5,
            num_completion_tokens=10,
            num_cached_tokens=0,
            num_accepted=accepted,
            num_rejected=3,
        )
        for accepted in (6, 7)
    ]
    told = usage(ends, 2)
    assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (5, 20, 25)
    details = told.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (13, 6)
