from __future__ import annotations

from app.translation.render import TextScores, usage
from deployments.generation import EndReason, Finished, TokenScore


def test_offsets_count_a_character_once_though_several_tokens_spell_it() -> None:
    spelt = "é🙂!".encode()
    scores = [TokenScore(byte, "\ufffd", bytes([byte]), -0.5) for byte in spelt]
    told = TextScores()
    assert told.next(scores[:4]).text_offset == [0, 0, 1, 1]
    assert told.next(scores[4:]).text_offset == [1, 1, 2]


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
