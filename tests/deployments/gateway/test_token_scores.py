from __future__ import annotations

import pytest

from deployments.answer_events import Started, TextDelta
from deployments.gateway.token_scores import scored, scored_prompt
from deployments.generation import TextPrompt, TokenPrompt
from deployments.tokenizer.text_codec import TextCodec
from engine.request import TokenLogprobs
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import ask, events_of


def letter(token_id: int) -> bytes:
    """Token 0 is `a`; token 26 is the first byte of a character, and no more."""
    return bytes([97 + token_id]) if token_id < 26 else b"\xc3"


def test_scores_tell_tokens_as_text_with_their_ranks() -> None:
    (score,) = scored(letter, [2], [TokenLogprobs(-3.0, ((0, -0.1), (26, -2.0)), rank=7)])
    assert (score.text, score.logprob, score.rank) == ("c", -3.0, 7)
    assert [(top.text, top.rank) for top in score.top] == [("a", 1), ("\ufffd", 2)]


def test_the_first_token_of_a_prompt_follows_nothing() -> None:
    first, second = scored_prompt(letter, [0, 1], [TokenLogprobs(-1.0)])
    assert (first.text, first.logprob, second.text, second.logprob) == ("a", None, "b", -1.0)


def test_what_the_text_does_not_show_has_a_name_and_no_bytes_of_it() -> None:
    (score,) = scored(letter, [2], [TokenLogprobs(-3.0, ((2, -3.0),))], hidden={2})
    assert (score.text, score.raw, score.top[0].raw) == ("c", b"", b"c")
    scores = scored_prompt(letter, [0, 1, 0], [TokenLogprobs(-1.0)] * 2, hidden={0})
    assert b"".join(score.raw for score in scores) == b"b"


@pytest.mark.parametrize("text", [" bc", "bc"])
def test_offsets_do_not_count_a_space_that_only_the_tokenizer_put_in_front(text: str) -> None:
    spellings = [b"<s>", b" b", b"c"] if text == "bc" else [b"<s>", b" ", b"bc"]
    entries = [TokenLogprobs(-1.0)] * 2
    scores = scored_prompt(spellings.__getitem__, range(3), entries, hidden={0}, text=text)
    assert b"".join(score.raw for score in scores).decode() == text
    assert [score.text for score in scores] == [spelling.decode() for spelling in spellings]


async def test_the_bytes_of_tokens_are_those_of_prompt_and_answer(gateway: OpenGateway, serving: Serving) -> None:
    """Offsets in a text counted the names of special tokens, which it does not show."""
    codec = TextCodec(serving.model.tokenizer_path)
    (mark, special), *_ = codec.pieces.special_ids.items()
    ids = codec.encode_text("Say")
    # What is typed is shown, and of token ids their text.
    for prompt in (TextPrompt(text=f"Say{mark}"), TokenPrompt(token_ids=(special, *ids, special))):
        asked = {"num_logprobs": 1, "num_prompt_logprobs": 1, "logit_bias": ((special, 100.0), (ids[0], 100.0))}
        params = asked | {"frequency_penalty": 2.0}
        started, *deltas, _ = await events_of(await gateway(), ask(prompt, max_tokens=8, echoes=True, params=params))
        assert isinstance(started, Started)
        scores = [score for delta in deltas if isinstance(delta, TextDelta) for score in delta.scores]
        assert {score.token_id for score in scores} == {special, ids[0]}
        assert special in {score.token_id for score in started.prompt_scores}
        shown = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
        assert b"".join(score.raw for score in scores).decode() == shown
        assert b"".join(score.raw for score in started.prompt_scores).decode() == started.prompt_text
