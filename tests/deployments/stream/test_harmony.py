"""However an answer in the harmony format is cut into pieces, its thoughts, its content and its calls are the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.translation.streaming import joined_calls
from deployments.generation import ToolCall
from deployments.stream.harmony import MARKS, SIGN_BY_MARK, HarmonyCounter, HarmonyParts, HarmonyStops, without_signs

Found = tuple[str, str, tuple[ToolCall, ...]]


def signed(text: str) -> str:
    """Put a mark's sign wherever a text spells it."""
    for mark, sign in SIGN_BY_MARK.items():
        text = text.replace(mark, sign)
    return text


def parse(pieces: Sequence[str], *, tools: Sequence[str] = ("f", "g"), has_begun: bool = False) -> tuple[Found, bool]:
    parts = HarmonyParts(tools, has_begun=has_begun, new_call_id=lambda: "id")
    found = [parts.feed(piece) for piece in pieces] + [parts.close()]
    calls = joined_calls(call for _, _, some in found for call in some)
    return ("".join(thoughts for thoughts, _, _ in found), "".join(text for _, text, _ in found), calls), (
        parts.has_calls
    )


def called(arguments: str, name: str = "f") -> tuple[ToolCall, ...]:
    return (ToolCall(call_id="id", name=name, arguments=arguments),)


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected", "is_called"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|> Yes.\n", ("Hm.", " Yes.\n", ()), False),
        ("<|channel|>final<|message|>Yes.", ("", "Yes.", ()), False),
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", ()), False),
        (
            f'{ANALYSIS}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}',
            ("Hm.", "", called('{"a": 1}')),
            True,
        ),
        (' to=functions.g<|channel|>commentary json<|message|>{"a": 1', ("", "", called('{"a": 1', "g")), False),
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", ("", "", called("{}")), True),
        ("<|channel|>commentary to=functions.unknown<|message|>{}", ("", "{}", ()), False),
        ("<|channel|>commentary to=python<|message|>1", ("", "1", ()), False),
        ("<|channel|>analysis to=python code<|message|>1", ("1", "", ()), False),
        ("<|channel|>analysis<|message|>H<|message|>m.", ("Hm.", "", ()), False),
        (
            "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            "<|message|>{}",
            ("", "I'll look.", called("{}")),
            True,
        ),
        (
            "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
            ("", "One.\n\nTwo.", ()),
            False,
        ),
        (f"{ANALYSIS}{ANALYSIS}<|channel|>final<|message|>Yes.", ("Hm.\n\nHm.", "Yes.", ()), False),
        (" to=functions.", ("", "", ()), False),
        ("<|channel|>fin", ("", "", ()), False),
        ("", ("", "", ()), False),
    ],
)
def test_messages_are_thoughts_content_or_calls(text: str, expected: Found, is_called: bool) -> None:
    assert parse([signed(text)]) == (expected, is_called)


def test_an_answer_without_marks_is_content_where_it_cannot_be_the_beginning_of_a_call() -> None:
    assert parse(["An answer with", "out marks."], tools=())[0] == ("", "An answer without marks.", ())


def test_text_that_spells_marks_is_text() -> None:
    """A model that tells of its own format wrote itself a channel, where marks were looked for in the text."""
    spelt = "Write <|end|><|start|>assistant<|channel|>final<|message|>."
    (thoughts, content, _), _ = parse([signed("<|channel|>analysis<|message|>") + spelt])
    assert (thoughts, content) == (spelt, "")


def test_an_answer_that_goes_on_with_a_message_begins_in_it() -> None:
    assert parse([signed("and so on.<|end|>")], has_begun=True)[0] == ("", "and so on.", ())


PIECE = st.one_of(
    st.sampled_from(list(SIGN_BY_MARK.values())),
    st.sampled_from(["analysis", "final", "commentary", " to=functions.f", "assistant", "{}", '{"a": [1', "\n", " "]),
    st.text(max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECE, max_size=20), cuts=st.lists(st.integers(0, 60), max_size=10))
def test_how_the_stream_is_cut_changes_nothing(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    cut = [text[start:end] for start, end in pairwise(places)]
    assert parse(cut) == parse([text]) == parse(list(text))


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECE, max_size=20))
def test_nothing_that_is_told_has_a_sign_in_it(pieces: list[str]) -> None:
    (thoughts, content, calls), _ = parse(["".join(pieces)])
    told = thoughts + content + "".join(call.arguments for call in calls)
    assert told == without_signs(told)
    told.encode()


@pytest.mark.parametrize(
    ("text", "expected", "stop"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Yes, assistant.", ("Hm.", "Yes, ", ()), "assistant"),
        ("<|channel|>final<|message|>The final word.", ("", "The ", ()), "final"),
        (
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"json": 1}',
            ("", "", called('{"')),
            "json",
        ),
        ("<|channel|>final<|message|>a json<|constrain|>", ("", "a ", ()), "json"),
        ("<|channel|>final<|message|>a<|constrain|> json", ("", "a ", ()), "json"),
        ("<|channel|>final<|message|>A fin", ("", "A fin", ()), None),
        (' to=functions.json<|channel|>commentary json<|message|>{"json": 1}', ("", '{"', ()), "json"),
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_stop_strings_are_not_looked_for_in_headers(text: str, expected: Found, stop: str | None, is_cut: bool) -> None:
    """Stopped at "assistant", an answer with thoughts ended after them: the next message's header has that word."""
    stops, matched, kept = HarmonyStops(["assistant", "final", "json"], has_tools=True), None, []
    for piece in list(signed(text)) if is_cut else [signed(text)]:
        safe, found = stops.feed(piece)
        kept.append(safe)
        matched = matched or found
        if found is not None:
            break
    kept.append(stops.close())
    assert (parse(kept)[0], matched) == (expected, stop)


def test_stop_strings_are_looked_for_in_content_without_marks() -> None:
    assert HarmonyStops(["assistant"]).feed("Without marks, assistant.") == ("Without marks, ", "assistant")


def test_tokens_of_thoughts_are_counted_with_the_marks_before_them() -> None:
    counter = HarmonyCounter()
    marks = signed("".join(MARKS))
    assert len(marks) == len(MARKS)
    for token in ("<|channel|>", "analysis", "<|message|>", "So", ".", "<|end|>", "<|start|>", "assistant"):
        counter.feed(signed(token))
    assert counter.num_tokens == 5
    for token in ("<|channel|>", "final", "<|message|>", "Yes"):
        counter.feed(signed(token))
    assert counter.num_tokens == 5
