"""However an answer is cut into pieces, its blocks are the same, and so are the log-probabilities of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.translation.blocks import Block, BlockKind, BlockReader
from deployments.gateway.answer_shape import AnswerParts
from deployments.generation import TextDelta, TokenScore
from deployments.stream.reasoning import THINK, ReasoningSplit
from deployments.tools.formats import FORMATS
from deployments.tools.parser import CallParser

TOOLS = {"f": {"properties": {"a": {"type": "string"}}}}
ANSWER = ["<think>", "a", "<", "</think>", "\n", "<", "<", " a", " a", "<", "fun", "<", "<", "\n", "\n", "a"]
CALL = ["<function=f>", "\n<parameter=a>", "\nx", "\n", "</parameter>", "\n</function>"]


def blocks_of(tokens: Sequence[str], cuts: Iterable[int]) -> list[Block]:
    """Return the blocks of an answer that comes in batches of tokens, which end at these places."""
    calls = CallParser(FORMATS["qwen3_coder"], TOOLS, new_call_id=lambda: "id")
    parts, reader, start = AnswerParts(ReasoningSplit(THINK, has_begun=False), calls), BlockReader(), 0
    for end in (*sorted({cut for cut in cuts if cut < len(tokens)}), len(tokens)):
        scores = tuple(
            TokenScore(place, token, token.encode(), 0.0) for place, token in enumerate(tokens[start:end], start)
        )
        reasoning, text, found = parts.feed("".join(tokens[start:end]))
        list(reader.feed(TextDelta(text=text, reasoning=reasoning, calls=found, scores=scores)))
        start = end
    reasoning, text, found = parts.close()
    list(reader.feed(TextDelta(text=text, reasoning=reasoning, calls=found)))
    return reader.blocks


CUTS = st.sets(st.integers(1, len(ANSWER)))


@given(cuts=CUTS)
def test_every_token_of_a_text_keeps_its_log_probability_though_others_are_spelled_like_it(cuts: set[int]) -> None:
    """Where text was held back that might have begun a call, a token before it went missing with some batches."""
    thoughts, text = blocks_of(ANSWER, cuts)
    assert (thoughts.text, text.text) == ("a<", "<< a a<fun<<\n\na")
    assert [score.token_id for score in text.scores] == [*range(5, len(ANSWER))]


@given(cuts=st.sets(st.integers(1, len(CALL) + 2)))
def test_text_stands_behind_the_call_that_it_follows(cuts: set[int]) -> None:
    """With a call's end in its batch, the text came before it, and cut it in two, the second without id and name."""
    blocks = blocks_of(["So.", *CALL, " Done", "."], cuts)
    assert [(block.kind, block.text) for block in blocks] == [
        (BlockKind.TEXT, "So."),
        (BlockKind.CALL, '{"a": "x"}'),
        (BlockKind.TEXT, "Done."),
    ]
