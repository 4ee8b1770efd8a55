"""However an answer is cut into pieces, its blocks are the same, and so are the log-probabilities of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import sentinel

from hypothesis import given
from hypothesis import strategies as st

from app.translation.blocks import Block, BlockKind, BlockReader
from deployments.answer_events import CallDelta, TextDelta, TokenScore
from deployments.gateway.answer_shape import AnswerParts
from deployments.gateway.answer_writer import AnswerWriter
from deployments.generation import GenerationRequest
from deployments.stream.detokenizer import ByteDetokenizer, MarkDetokenizer
from deployments.stream.harmony import CHANNEL, END, MESSAGE, SIGN_BY_MARK, START, HarmonyParts
from deployments.stream.reasoning import THINK, ReasoningSplit
from deployments.stream.stop_strings import StopStrings
from deployments.stream.stream_handler import StreamHandler
from deployments.tools.formats import FORMATS
from deployments.tools.parser import CallParser
from engine.request import SamplingParams

TOOLS = {"f": {"properties": {"a": {"type": "string"}}}}
ANSWER = ["<think>", "a", "<", "</think>", "\n", "<", "<", " a", " a", "<", "fun", "<", "<", "\n", "\n", "a"]
CALL = ["<function=f>", "\n<parameter=a>", "\nx", "\n", "</parameter>", "\n</function>"]
UNASKED: Any = sentinel.unasked


def parts_of_answer() -> AnswerParts:
    calls = CallParser(FORMATS["qwen3_coder"], TOOLS, new_call_id=lambda: "id")
    return AnswerParts(ReasoningSplit(THINK, has_begun=False), calls)


def deltas_of(
    tokens: Sequence[str | bytes],
    cuts: Iterable[int],
    *,
    stop: str | None = None,
    parts: Any = None,
    is_scored: bool = True,
) -> list[TextDelta]:
    """Return the pieces of an answer that comes in batches of tokens, which end at these places."""
    marks = {place: str(token) for place, token in enumerate(tokens) if token in SIGN_BY_MARK.values()}
    raws = [
        b"" if token in marks.values() else token if isinstance(token, bytes) else token.encode() for token in tokens
    ]
    texts = MarkDetokenizer(lambda: ByteDetokenizer(raws.__getitem__), marks, ByteDetokenizer(raws.__getitem__))
    stops = StopStrings((stop,) if stop else ())
    handler = StreamHandler(texts, stops, screen=None, judge=UNASKED, holds_ids=True)
    params = SamplingParams(max_tokens=9, num_logprobs=0)
    request = GenerationRequest(request_id="r", model="m", prompt=UNASKED, params=params, returns_token_ids=True)
    writer = AnswerWriter(request, UNASKED, None, UNASKED, ())
    deltas: list[TextDelta] = []
    parts = parts or parts_of_answer()

    async def read() -> None:
        start = 0
        for end in (*sorted({cut for cut in cuts if cut < len(tokens)}), len(tokens)):
            ids = range(start, end)
            scores = [TokenScore(place, "", raws[place], 0.0) for place in ids] if is_scored else ()
            deltas.extend(writer.deltas(parts, await handler.feed(ids, scores), handler))
            start = end
        deltas.extend(writer.deltas(parts, await handler.close(), handler))
        deltas.extend(writer.last_deltas(parts, handler))

    asyncio.run(read())
    return deltas


def blocks_of(
    tokens: Sequence[str | bytes], cuts: Iterable[int], *, stop: str | None = None, parts: Any = None
) -> list[Block]:
    """Return the blocks of an answer that comes in batches of tokens, which end at these places."""
    reader = BlockReader()
    for delta in deltas_of(tokens, cuts, stop=stop, parts=parts):
        list(reader.feed(delta))
    return reader.blocks


CUTS = st.sets(st.integers(1, len(ANSWER)))


@given(cuts=CUTS)
def test_every_token_of_a_text_keeps_its_log_probability_though_others_are_spelled_like_it(cuts: set[int]) -> None:
    """Where text was held back that might have begun a call, a token before it went missing with some batches."""
    thoughts, text = blocks_of(ANSWER, cuts)
    assert (thoughts.text, text.text) == ("a<", "<< a a<fun<<\n\na")
    assert [score.token_id for score in text.scores] == [*range(5, len(ANSWER))]


@given(
    marks=st.sampled_from([["<", "think", ">", "</", "think", ">"], ["<think", ">\n", "</think", ">\n\n"]]),
    text=st.sampled_from([["think", "!"], [">", " a"], ["</", "b", ">"], [" a", "<"], ["a<", "b"], ["a"], [" ", "<"]]),
    cuts=st.sets(st.integers(1, 9)),
)
def test_a_text_that_begins_like_a_mark_of_several_tokens_keeps_its_log_probabilities_alone(
    marks: list[str], text: list[str], cuts: set[int]
) -> None:
    """Those of the mark's own tokens stood in their place."""
    half = len(marks) // 2
    tokens = [*marks[:half], "a", *marks[half:], *text]
    _, block = blocks_of(tokens, cuts)
    assert block.text == "".join(text).lstrip()
    spelled = [score.token_id for score in block.scores]
    assert spelled == list(range(len(tokens) - len([part for part in text if part.strip()]), len(tokens)))


@given(cuts=st.sets(st.integers(1, len(CALL) + 2)))
def test_text_stands_behind_the_call_that_it_follows(cuts: set[int]) -> None:
    """With a call's end in its batch, the text came before it, and cut it in two, the second without id and name."""
    blocks = blocks_of(["So.", *CALL, " Done", "."], cuts)
    assert [(block.kind, block.text) for block in blocks] == [
        (BlockKind.TEXT, "So."),
        (BlockKind.CALL, '{"a": "x"}'),
        (BlockKind.TEXT, "Done."),
    ]


@given(cuts=st.sets(st.integers(1, 12)), behind=st.sampled_from([[], CALL]))
def test_the_tokens_of_a_text_keep_their_log_probabilities_though_the_space_in_them_is_held_back(
    cuts: set[int], behind: list[str]
) -> None:
    """The first ones of a batch went missing if space at the end of its last waited, and the last before a call."""
    text, *_ = blocks_of(["h", "ello ", "é🙂 a", "b\n", *behind], cuts)
    assert text.text.rstrip() == "hello é🙂 ab"
    assert [score.token_id for score in text.scores] == [0, 1, 2, 3]


@given(cuts=st.sets(st.integers(1, 3)))
def test_a_token_of_which_a_stop_string_left_the_beginning_keeps_its_log_probability(cuts: set[int]) -> None:
    """Where all came in one batch, no token had one."""
    (text,) = blocks_of(["It", " is", " so.", " No"], cuts, stop=".")
    assert text.text == "It is so"
    assert [score.token_id for score in text.scores] == [0, 1, 2]


@given(
    tokens=st.lists(st.sampled_from([b"a", b"\xff", b"\xc3", b"a\xc3", b"\xa9", b"\xe2\x82", b"\xac", b""]), max_size=8)
)
def test_the_tokens_of_a_character_have_its_place(tokens: list[bytes]) -> None:
    """Bytes that are no text are shown as another character; special tokens have no text and no log-probability."""
    (block,), (whole,) = (blocks_of([b"x", *tokens], cuts) for cuts in (range(1, 9), ()))
    told = [score.token_id for score in block.scores]
    assert told == [0, *(place for place, token in enumerate(tokens, 1) if token)]
    assert (block.text, block.scores) == (whole.text, whole.scores)


@given(cuts=st.sets(st.integers(1, 6)))
def test_a_token_that_ends_in_a_character_is_of_its_text_though_its_space_is_dropped(cuts: set[int]) -> None:
    """As those of many vocabularies: a space, and half an emoji."""
    _, text = blocks_of(["<think>", "a", "</think>", "\n\n", b" \xf0\x9f", b"\x98\x80", " hi"], cuts)
    assert (text.text, [score.token_id for score in text.scores]) == ("😀 hi", [4, 5, 6])


@given(cuts=st.sets(st.integers(1, 6)))
def test_a_mark_that_ends_a_character_is_not_of_its_text(cuts: set[int]) -> None:
    channel, message, end = (SIGN_BY_MARK[mark] for mark in (CHANNEL, MESSAGE, END))
    (text,) = blocks_of([channel, "final", message, "a", b"\xf0\x9f", end], cuts, parts=HarmonyParts())
    assert (text.text, [score.token_id for score in text.scores]) == ("a\ufffd", [3, 4])


def test_scores_that_come_too_late_open_no_text() -> None:
    """The rest of a call would have been another one, without a name."""
    reader, score = BlockReader(), TokenScore(0, "a", b"a", 0.0)
    for delta in (
        TextDelta(text="a"),
        TextDelta(calls=(CallDelta(index=0, call_id="id", name="f", arguments="{"),)),
        TextDelta(scores=(score,), text_scores=(score,)),
        TextDelta(calls=(CallDelta(index=0, arguments="}"),)),
    ):
        list(reader.feed(delta))
    assert [(block.kind, block.text) for block in reader.blocks] == [(BlockKind.TEXT, "a"), (BlockKind.CALL, "{}")]


@given(cuts=st.sets(st.integers(1, 12)))
def test_the_tokens_of_a_message_are_not_those_of_its_marks(cuts: set[int]) -> None:
    """They were found by their spelling, which the channel's name has, too."""
    start, channel, message, end = (SIGN_BY_MARK[mark] for mark in (START, CHANNEL, MESSAGE, END))
    tokens = [channel, "final", message, "final", " one", end, start, "assistant", channel, "final", message]
    (text,) = blocks_of([*tokens, "final"], cuts, parts=HarmonyParts())
    assert text.text == "final one\n\nfinal"
    assert [score.token_id for score in text.scores] == [3, 4, 11]


@given(cuts=st.sets(st.integers(1, 3)))
def test_a_message_without_any_mark_keeps_its_log_probabilities(cuts: set[int]) -> None:
    """They came before it was known to be one."""
    (text,) = blocks_of(["So", " it", " is"], cuts, parts=HarmonyParts())
    assert [score.token_id for score in text.scores] == [0, 1, 2]
