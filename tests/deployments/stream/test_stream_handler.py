"""What leaves of an answer, and that the scores of its tokens leave with it: not before, and not of what is cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.answer_events import TokenScore, Verdict
from deployments.stream.detokenizer import ByteDetokenizer, MarkDetokenizer
from deployments.stream.harmony import CHANNEL, MESSAGE, SIGN_BY_MARK, HarmonyStops
from deployments.stream.reasoning import THINK, ReasoningCounter
from deployments.stream.screening import OutputScreen
from deployments.stream.stop_strings import StopStrings
from deployments.stream.stream_handler import HeldToken, StreamHandler

PIECES = ["a", "b", "ab", "ba ", "", "é", "🙂", " "]
"""Tokens by id; those after them are the bytes of an emoji, one each."""
BYTES = [piece.encode() for piece in PIECES] + [bytes([byte]) for byte in "🙂".encode()]
FINE = Verdict(score_by_hazard={}, flagged=())
BAD = Verdict(score_by_hazard={"hate": 1.0}, flagged=("hate",))


def score(token_id: int) -> TokenScore:
    return TokenScore(token_id, BYTES[token_id].decode("utf-8", "replace"), BYTES[token_id], -1.0)


async def run(
    batches: Sequence[Sequence[int]],
    stops: Sequence[str],
    window: int | None,
    forbidden: str | None = None,
    *,
    scored: bool = True,
) -> tuple[str, list[int], bool]:
    """Feed batches; returns the text, the tokens whose scores were told, and whether a stop string was met.

    At every moment the told tokens are at most the text that has left.
    """

    async def judge(texts: Sequence[str]) -> list[Verdict]:
        return [BAD if forbidden is not None and forbidden in text else FINE for text in texts]

    screen = None if window is None else OutputScreen(window_chars=window, overlap_chars=window // 2)
    handler = StreamHandler(
        ByteDetokenizer(BYTES.__getitem__), StopStrings(stops), screen=screen, judge=judge, holds_ids=not scored
    )
    text, told = "", []
    for batch in batches:
        text += await handler.feed(batch, [score(token_id) for token_id in batch] if scored else ())
        told += [found.token_id for found in handler.take_tokens()]
        shown = b"".join(BYTES[token_id] for token_id in told).decode("utf-8", "replace").rstrip("\ufffd")
        assert text.startswith(shown)
        if handler.is_cut or handler.is_flagged:
            break
    text += await handler.close()
    told += [found.token_id for found in handler.take_tokens()]
    return text, told, handler.is_cut


TOKENS = st.lists(st.integers(0, len(BYTES) - 1), max_size=24)


@given(tokens=TOKENS, cuts=st.sets(st.integers(0, 24)), window=st.sampled_from([None, 4, 9]))
async def test_of_a_whole_answer_every_token_is_told_once(
    tokens: list[int], cuts: set[int], window: int | None
) -> None:
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    batches = [tokens[start:end] for start, end in itertools.pairwise(edges)]
    text, told, _ = await run(batches, [], window)
    assert told == tokens
    assert text == b"".join(BYTES[token_id] for token_id in tokens).decode("utf-8", "replace")


# The stop string begins within a token; only its beginning comes.
@example(tokens=[0, 2, 7, 0], stop="b a", window=None)
@example(tokens=[0, 2, 7], stop="b a", window=None)
@given(tokens=TOKENS, stop=st.sampled_from(["ab", "b a", "🙂", "aba"]), window=st.sampled_from([None, 5]))
async def test_of_a_text_that_is_cut_what_it_shows_is_told(tokens: list[int], stop: str, window: int | None) -> None:
    one_by_one = await run([[token_id] for token_id in tokens], [stop], window)
    assert await run([tokens], [stop], window) == one_by_one
    text, told, is_cut = one_by_one
    assert told == tokens[: len(told)]
    whole = b"".join(BYTES[token_id] for token_id in tokens).decode("utf-8", "replace")
    assert (text, is_cut) == (whole.partition(stop)[0], stop in whole)
    if not is_cut:
        assert told == tokens
        return
    spelt = b"".join(BYTES[token_id] for token_id in told).decode("utf-8", "replace")
    # The last one may reach into the stop string; the one before it does not.
    before = b"".join(BYTES[token_id] for token_id in told[:-1]).decode("utf-8", "ignore")
    assert len(spelt.rstrip("\ufffd")) >= len(text.rstrip("\ufffd")) or not told
    assert len(before) <= len(text)


@pytest.mark.parametrize("scored", [True, False])
async def test_what_the_classifier_holds_back_is_not_told(scored: bool) -> None:
    tokens = [0, 7, 0, 7, 0, 7, 1, 7, 1, 7, 1]
    text, told, _ = await run([[token_id] for token_id in tokens], [], 4, forbidden="b", scored=scored)
    assert "b" not in text
    assert 1 not in told


async def test_a_reader_of_the_text_in_parts_takes_the_scores_of_each() -> None:
    handler = StreamHandler(ByteDetokenizer(BYTES.__getitem__), StopStrings(()), screen=None, judge=fine)
    await handler.feed([2, 1, 0], [score(2), score(1), score(0)])
    assert [ids(handler.take_tokens(num_behind)) for num_behind in (2, 1, 1, 0)] == [[2], [1], [], [0]]


async def fine(texts: Sequence[str]) -> list[Verdict]:
    return [FINE for _ in texts]


async def test_the_tokens_of_the_thoughts_are_counted_as_they_come() -> None:
    handler = StreamHandler(
        ByteDetokenizer(lambda token_id: [b"<think>", b"so", b"</think>", b"yes"][token_id]),
        StopStrings(()),
        screen=None,
        judge=fine,
        reasoning=ReasoningCounter(THINK, has_begun=False),
    )
    assert await handler.feed([0, 1]) == "<think>so"
    assert handler.num_reasoning_tokens == 2
    await handler.feed([2, 3, 3])
    assert (handler.num_reasoning_tokens, handler.num_tokens) == (3, 5)


async def test_no_stop_string_is_looked_for_in_the_least_number_of_tokens() -> None:
    """Such a string ended answers of fewer tokens than were asked for; however the tokens came."""
    tokens = [0, 1, 2, 0, 5, 1, 0]
    for min_tokens, text, num_tokens in [(0, "a", 2), (1, "a", 2), (2, "aba", 3), (3, "ababaé", 6), (6, "ababaéba", 7)]:
        for size in (1, 2, 7):
            handler = StreamHandler(
                ByteDetokenizer(BYTES.__getitem__), StopStrings(["b"]), screen=None, judge=fine, min_tokens=min_tokens
            )
            found = [await handler.feed(tokens[at : at + size]) for at in range(0, len(tokens), size)]
            assert "".join(found) + await handler.close() == text
            assert (handler.num_tokens, handler.is_cut) == (num_tokens, min_tokens < 6)


async def test_the_least_number_of_tokens_hides_no_mark_from_the_stop_strings() -> None:
    """A stop string is not looked for in a header, and a header may begin among the first tokens."""
    texts = [SIGN_BY_MARK[CHANNEL], "final", SIGN_BY_MARK[MESSAGE], "or final"]
    handler = StreamHandler(
        MarkDetokenizer(_no_bytes, dict(enumerate(texts)), _no_bytes()),
        HarmonyStops(["final"]),
        screen=None,
        judge=fine,
        min_tokens=1,
    )
    assert await handler.feed(range(4)) == "".join(texts[:3]) + "or "
    assert handler.stop == "final"


def _no_bytes() -> ByteDetokenizer:
    return ByteDetokenizer(lambda _: b"")


async def fed(*stops: str) -> StreamHandler:
    """A handler that was fed tokens of 3, 0 and 2 characters."""
    detokenizer = ByteDetokenizer([b"abc", b"", b"de"].__getitem__)
    handler = StreamHandler(detokenizer, StopStrings(stops), screen=None, judge=fine, holds_ids=True)
    await handler.feed(range(3))
    return handler


def ids(tokens: Sequence[HeldToken]) -> list[int]:
    return [token.token_id for token in tokens]


async def test_a_token_leaves_with_its_last_character_and_only_once() -> None:
    handler = await fed()
    taken = [ids(handler.take_tokens(num_behind)) for num_behind in (3, 2, 1, 0, 0)]
    assert taken == [[], [0, 1], [], [2], []]


@pytest.mark.parametrize(("stops", "left"), [(["e"], [0, 1, 2]), (["d"], [0]), (["a"], []), ([], [0, 1, 2])])
async def test_at_a_cut_only_tokens_that_show_something_are_left(stops: Sequence[str], left: list[int]) -> None:
    handler = await fed(*stops)
    await handler.close()
    assert ids(handler.take_tokens()) == left
    assert handler.take_tokens() == ()
