"""However an answer is cut into pieces, its blocks are the same, and so are the log-probabilities of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.translation.blocks import Block, BlockKind, BlockReader
from deployments.answer_events import TextDelta, TokenScore
from deployments.gateway.answer_shape import AnswerParts
from deployments.stream.reasoning import THINK, ReasoningSplit
from deployments.stream.stream_handler import HeldToken, HeldTokens
from deployments.tools.formats import FORMATS
from deployments.tools.parser import CallParser

TOOLS = {"f": {"properties": {"a": {"type": "string"}}}}
ANSWER = ["<think>", "a", "<", "</think>", "\n", "<", "<", " a", " a", "<", "fun", "<", "<", "\n", "\n", "a"]
CALL = ["<function=f>", "\n<parameter=a>", "\nx", "\n", "</parameter>", "\n</function>"]


def scores_of(tokens: Iterable[HeldToken]) -> tuple[TokenScore, ...]:
    return tuple(token.score for token in tokens if token.score is not None)


def blocks_of(tokens: Sequence[str], cuts: Iterable[int]) -> list[Block]:
    """Return the blocks of an answer that comes in batches of tokens, which end at these places."""
    calls = CallParser(FORMATS["qwen3_coder"], TOOLS, new_call_id=lambda: "id")
    parts, reader, held = AnswerParts(ReasoningSplit(THINK, has_begun=False), calls), BlockReader(), HeldTokens()
    start = num_chars = 0
    for end in (*sorted({cut for cut in cuts if cut < len(tokens)}), len(tokens)):
        for place, token in enumerate(tokens[start:end], start):
            score = TokenScore(place, token, token.encode(), 0.0)
            held.add(HeldToken(num_chars, num_chars + len(token), place, score))
            num_chars += len(token)
        reasoning, text, found = parts.feed("".join(tokens[start:end]))
        scores = scores_of(held.release(num_chars - parts.num_held))
        list(reader.feed(TextDelta(text=text, reasoning=reasoning, calls=found, scores=scores)))
        start = end
    reasoning, text, found = parts.close()
    list(reader.feed(TextDelta(text=text, reasoning=reasoning, calls=found, scores=scores_of(held.close(None)))))
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


def test_a_token_of_which_a_stop_string_left_the_beginning_keeps_its_log_probability() -> None:
    """Where all came in one batch, no token had one."""
    scores = tuple(TokenScore(place, token, token.encode(), 0.0) for place, token in enumerate(["It", " is", " so."]))
    for num in range(3):
        reader = BlockReader()
        for delta in (
            TextDelta(text="It is so"[: 3 * num], scores=scores[:num]),
            TextDelta(text="It is so"[3 * num :], scores=scores[num:2]),
            TextDelta(scores=scores[2:]),
        ):
            list(reader.feed(delta))
        assert [score.token_id for score in reader.blocks[0].scores] == [0, 1, 2]


@given(text=st.text(st.sampled_from("a\ufffd"), min_size=1, max_size=8), odd=st.sampled_from([b"\xff", b""]))
def test_a_text_whose_tokens_spell_it_in_another_way_takes_them_as_they_come(text: str, odd: bytes) -> None:
    """Bytes that are no text are shown as another character, and special tokens have none."""
    reader = BlockReader()
    for place, char in enumerate(text):
        raw = odd if char == "\ufffd" else char.encode()
        list(reader.feed(TextDelta(text=char, scores=(TokenScore(place, char, raw, 0.0),))))
    told = [score.token_id for score in reader.blocks[0].scores]
    first = text.find("a")
    assert told == ([] if first < 0 else list(range(first, len(text))))
