from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


PIECES = [
    b"a",
    b" b",
    b"\x80",
    b"\xff",
    b"\xe2",
    b"\xe2\x82",
    b"\xac",
    b"\xf0\x9f",
    b"\x98\x80.",
    b"\xed",
    b"\xa0",
    b"",
]


@given(raws=st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)), max_size=8))
def test_a_token_of_whole_characters_is_in_the_text_at_its_offset(raws: list[bytes]) -> None:
    """Behind a character that was never finished it was one too small."""
    text = b"".join(raws).decode("utf-8", "replace")
    told = TextScores()
    for raw in raws:
        (offset,) = told.next([TokenScore(1, "", raw, -0.5)]).text_offset
        whole = raw.decode("utf-8", "ignore")
        if whole.encode() == raw:
            assert text[offset:].startswith(whole)


def test_an_unfinished_character_counts_before_the_token_that_does_not_go_on_with_it() -> None:
    raws = [b"\xf0", b"\x9f", b".", b"I", b"\xe2", b"\xe2", b""]
    told = TextScores().next([TokenScore(1, "", raw, -0.5) for raw in raws])
    assert told.text_offset == [0, 0, 1, 2, 3, 4, 4]


def scored(token_id: int, raw: bytes, logprob: float, *top: TokenScore) -> TokenScore:
    return TokenScore(token_id, raw.decode("utf-8", "replace"), raw, logprob, top)


def test_tokens_that_are_no_whole_characters_are_named_by_their_bytes() -> None:
    """All were named alike: the likeliest stood for the chosen one, which then seemed to be the greedy choice."""
    told = TextScores().next([scored(1, b"\x80", -5.0, scored(2, b" \\\x81", -0.1), scored(3, b".", -3.0))])
    assert told.tokens == ["bytes:\\x80"]
    assert told.top_logprobs == [{"bytes: \\x5c\\x81": -0.1, ".": -3.0, "bytes:\\x80": -5.0}]
    assert TextScores().next([scored(1, "\ufffd".encode(), -1.0)]).tokens == ["\ufffd"]
    assert TextScores(by_id=True).next([scored(1, b"\x80", -1.0)]).tokens == ["token_id:1"]


@given(raws=st.lists(st.binary(max_size=3), min_size=1, max_size=6), data=st.data())
def test_the_chosen_token_has_its_own_log_probability_under_its_name(raws: list[bytes], data: st.DataObject) -> None:
    """Even if a likelier one is spelled like it."""
    top = [scored(token_id, raw, -1.0 - token_id) for token_id, raw in enumerate(raws)]
    kept = data.draw(st.integers(0, len(top)))
    chosen = data.draw(st.sampled_from(top))
    told = TextScores().next([chosen._replace(top=tuple(top[:kept]))])
    assert told.top_logprobs[0] is not None
    assert told.top_logprobs[0][told.tokens[0]] == told.token_logprobs[0]


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
