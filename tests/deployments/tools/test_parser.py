"""However the text of an answer is cut into pieces, its content and its calls are the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.translation.streaming import joined_calls
from deployments.answer_events import CallDelta
from deployments.generation import ToolCall
from deployments.stream.reasoning import MAX_SPACE
from deployments.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from deployments.tools.parser import CallParser

TOOLS: dict[str, dict[str, Any]] = {name: {} for name in ("get", "get_weather", "x-y")}
OF_JSON = [tool_format for tool_format in FORMATS.values() if not tool_format.is_tagged]
OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=6), st.sampled_from(['}"', "</tool_call>", "\\", ']"}'])),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)


def written(tool_format: ToolFormat, calls: Sequence[tuple[str, str]], space: str = "\n", which: int = 0) -> str:
    """Calls as a model writes them, with white space wherever it may stand, and one of the heads that they may have."""
    tell = tags if tool_format.is_tagged else str
    bodies = [
        space.join([*tool_format.heads(name)[which], tell(arguments), *tool_format.after_arguments])
        for name, arguments in calls
    ]
    return space.join([*tool_format.opening, space.join([*tool_format.between, ""]).join(bodies), *tool_format.closing])


def tags(arguments: str) -> str:
    """Arguments as tags, or as they are where they are no JSON."""
    if not arguments.startswith('{"') and arguments != "{}":
        return arguments
    told = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in json.loads(arguments).items()
    }
    return "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in told.items())


def parsed(
    tool_format: ToolFormat, pieces: Sequence[str], *, is_required: bool = False, is_either: bool = False
) -> tuple[str, list[tuple[str, str]], bool]:
    ids = iter(range(1000))
    parser = CallParser(
        tool_format, TOOLS, is_required=is_required, is_either=is_either, new_call_id=lambda: f"id{next(ids)}"
    )
    content, deltas = "", list[CallDelta]()
    for piece in pieces:
        text, calls = parser.feed(piece)
        content += text
        deltas += calls
    content += parser.close()
    found = joined_calls(deltas)
    assert [call.call_id for call in found] == [f"id{index}" for index in range(len(found))]
    return content, [(call.name, call.arguments) for call in found], parser.has_calls


def cuts(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(
    tool_format=st.sampled_from(OF_JSON),
    calls=st.lists(st.tuples(st.sampled_from(list(TOOLS)), OBJECTS.map(json.dumps)), min_size=1, max_size=3),
    space=st.sampled_from(["", " ", "\n"]),
    which=st.sampled_from([0, -1]),
    lead=st.sampled_from(["", "Let me see. <tool", "I'll [TOOL_ it.\n"]),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_calls_are_found_whatever_the_cuts(
    tool_format: ToolFormat, calls: list[tuple[str, str]], space: str, which: int, lead: str, places: list[int]
) -> None:
    lead = "" if tool_format.is_alone else lead
    text = lead + written(tool_format, calls, space, which) + space
    assert parsed(tool_format, cuts(text, places)) == (lead.rstrip(), calls, True)


@settings(max_examples=300, deadline=None)
@given(
    tool_format=st.sampled_from(list(FORMATS.values())),
    text=st.lists(
        st.sampled_from(
            [
                '{"name"',
                '{"type": "function", "name"',
                ": ",
                '"get"',
                ', "arguments"',
                ', "parameters"',
                "{",
                "}",
                "<tool_call>",
                "[ARGS]",
            ]
        )
        | st.sampled_from(["</tool_call>", "[TOOL_CALLS]", "[", "]", "get", " ", "\n", '"', "word"])
        | st.sampled_from(["<|python_tag|>", "<|python", " " * MAX_SPACE, "\n" * MAX_SPACE])
        | st.sampled_from(["<function=", "get>", "<function=get>", "<parameter=a>", "</parameter>", "</function>"])
    ).map("".join),
    places=st.lists(st.integers(0, 10_000), max_size=8),
    is_either=st.booleans(),
)
def test_any_text_is_read_alike_whole_and_in_pieces(
    tool_format: ToolFormat, text: str, places: list[int], *, is_either: bool
) -> None:
    pieces = cuts(text, places)
    assert parsed(tool_format, pieces, is_either=is_either) == parsed(tool_format, [text], is_either=is_either)


@settings(max_examples=100, deadline=None)
@given(
    tool_format=st.sampled_from(list(FORMATS.values())),
    space=st.sampled_from(["", "\n", " \n "]),
    lead=st.sampled_from(["", "use ", "x  ", "\\n"]),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_what_opens_a_call_is_text_in_content_that_a_grammar_holds(
    tool_format: ToolFormat, space: str, lead: str, places: list[int]
) -> None:
    """A string of JSON that named it was cut there, and what followed was a call or lost."""
    call = written(tool_format, [("get", '{"a": 1}')], space)
    for text in (f'{space}{{"note": "{lead}{call}"}}', f"{space}{{{lead}{tool_format.opening}", call[: len(space)]):
        assert parsed(tool_format, cuts(text, places), is_either=True) == (text, [], False)
    assert parsed(tool_format, cuts(space + call, places), is_either=True) == ("", [("get", '{"a": 1}')], True)


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_a_cut_answer_that_is_content_or_calls_shows_no_half_call(tool_format: ToolFormat) -> None:
    text = written(tool_format, [("get", "{}")], space="")
    num_opening = len(text) if tool_format.is_alone else len(tool_format.opening[0])
    for place in range(len(text)):
        content, calls, _ = parsed(tool_format, list(text[:place]), is_either=True)
        assert content == ("" if calls or place >= num_opening else text[:place])


@settings(max_examples=200, deadline=None)
@given(tool_format=st.sampled_from(OF_JSON), place=st.integers(0, 200))
def test_a_truncated_call_is_never_complete(tool_format: ToolFormat, place: int) -> None:
    text = written(tool_format, [("get", '{"a": "}"}')])
    end = text.index('"}"}') + len('"}"}')
    content, calls, has_calls = parsed(tool_format, [text[:place]])
    assert has_calls == (place >= end)
    assert not calls or '{"a": "}"}'.startswith(calls[0][1])
    assert calls or text.startswith(content)


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_the_beginning_of_a_call_is_no_content(tool_format: ToolFormat) -> None:
    """An answer that had to be a call, and was cut inside the call's name, showed `{"name": "ge` as its content."""
    text = written(tool_format, [("get", "{}")], space="")
    num_opening = len(text) if tool_format.is_alone else len(tool_format.opening[0])
    for place in range(len(text)):
        content, calls, _ = parsed(tool_format, list(text[:place]), is_required=True)
        assert content == ""
        # Where it may be content it is, until what opens a call is whole.
        content, calls, _ = parsed(tool_format, list(text[:place]))
        assert content == ("" if calls or place >= num_opening else text[:place])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, "no calls here, <tool_cal or so"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, 'As so: <tool_call>{"name": "unknown"}'),
        (LLAMA3, '{"name": "Bob", "age": 5}'),
        (JSON, '{"name": "get", "arguments": "none"}'),
        (MISTRAL, '[TOOL_CALLS] "get"'),
        (MISTRAL_ARGS, "[TOOL_CALLS]getter[ARGS]{}"),
        (JSON, 'I would write {"name": "get", "arguments": {}}'),
    ],
)
def test_what_is_no_call_is_content(tool_format: ToolFormat, text: str) -> None:
    assert parsed(tool_format, list(text)) == (text, [], False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|python_tag|>{"name": "get", "parameters": {}}', ("", [("get", "{}")], True)),
        ('\n<|python_tag|>\n{"name": "get", "parameters": {}}', ("", [("get", "{}")], True)),
        ('<|python_tag|>{"name": "Bob"}', ('<|python_tag|>{"name": "Bob"}', [], False)),
        ("<|python", ("<|python", [], False)),
    ],
)
def test_a_special_token_before_a_call_does_not_hide_it(text: str, expected: tuple[str, Any, bool]) -> None:
    """Where special tokens were shown, the calls of Llama 3 were content."""
    for pieces in ([text], list(text)):
        assert parsed(LLAMA3, pieces) == expected


CALL = '{"name": "get", "arguments": {}}'


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_white_space_without_end_does_not_wait_for_a_call(tool_format: ToolFormat) -> None:
    """All of it was held and searched again with each token: a thousand line breaks took a gateway 20 seconds."""
    text = written(tool_format, [("get", "{}")], space="")
    # Each of these beginnings may go on as a call; what is behind a call is no content.
    for begun in (text[:place] for place in range(len(text) + 1)):
        parser = CallParser(tool_format, TOOLS)
        parser.feed(begun)
        for _ in range(5 * MAX_SPACE):
            parser.feed("\n")
            assert parser.num_held <= len(text) + MAX_SPACE


@pytest.mark.parametrize("num", [1, MAX_SPACE, MAX_SPACE + 1])
def test_little_white_space_before_a_call_is_no_content(num: int) -> None:
    space, call = "\n" * num, f"<tool_call>{CALL}</tool_call>"
    for pieces in ([f"Hm.{space}{call}"], ["Hm.", *space, *call]):
        assert parsed(HERMES, pieces) == ("Hm." + space[MAX_SPACE:], [("get", "{}")], True)
    for pieces in ([space + CALL], [*space, *CALL]):
        is_call = num <= MAX_SPACE
        assert parsed(JSON, pieces) == (("", [("get", "{}")], True) if is_call else (space + CALL, [], False))


@pytest.mark.parametrize("behind", ["Done.", CALL])
def test_text_behind_a_call_is_content(behind: str) -> None:
    """Also where it ends the answer in one piece with the call, and where it is a call that nothing opens."""
    text = f"<tool_call>{CALL}</tool_call>\n{behind}"
    for pieces in ([text], [text[:-3], text[-3:]], list(text)):
        assert parsed(HERMES, pieces) == (behind, [("get", "{}")], True)


CODED = "<function=get>\n<parameter=a>\n1\n</parameter>\n</function>"
OTHER = "<function=x-y>\n</function>"


@settings(max_examples=100, deadline=None)
@given(
    text=st.sampled_from(
        [
            (f"I see.\n\n{CODED}", "I see.", ["get"]),
            (f"I see.\n\n{CODED}\n</tool_call>", "I see.", ["get"]),
            (f"{CODED}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>", "", ["get", "x-y"]),
            (f"{CODED}\n{OTHER}\n</tool_call>", "", ["get", "x-y"]),
            (f"<tool_call>\n{CODED}\n{OTHER}", "", ["get", "x-y"]),
            (f"Not <function=getter> or <function={CODED}", "Not <function=getter> or <function=", ["get"]),
            (f"<function=none><tool_call>{CODED}</tool_call>", "<function=none>", ["get"]),
            ("a <function=get", "a <function=get", []),
        ]
    ),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_calls_of_qwen_3_coder_may_lack_what_opens_them(text: tuple[str, str, list[str]], places: list[int]) -> None:
    """Its models forget it now and then, and their users saw the call as text."""
    written_text, expected, names = text
    content, calls, has_calls = parsed(FORMATS["qwen3_coder"], cuts(written_text, places))
    assert (content, [name for name, _ in calls], has_calls) == (expected, names, bool(names))
    assert all(arguments == ('{"a": 1}' if name == "get" else "{}") for name, arguments in calls)


@settings(max_examples=100, deadline=None)
@given(
    told=st.sampled_from(
        ["To call it, write <function=get>. Then wait.", "<function=get>\n", "a <function=get> <", "<"]
    ),
    call=st.sampled_from(["", f"<tool_call>{CODED}</tool_call>", CODED]),
    places=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_head_of_qwen_3_coder_that_is_only_mentioned_is_content(told: str, call: str, places: list[int]) -> None:
    """It began a call without valid arguments, and all text and all calls behind it were lost."""
    content, calls, has_calls = parsed(FORMATS["qwen3_coder"], cuts(told + call, places))
    assert (content, calls) == (told.rstrip() if call else told, [("get", '{"a": 1}')] if call else [])
    assert has_calls == bool(call)


@pytest.mark.parametrize("behind", ["<function=get> was called.", "So <function=get> was called."])
@pytest.mark.parametrize("call", [CODED, f"<tool_call>{CODED}</tool_call>"])
def test_a_head_of_qwen_3_coder_that_is_mentioned_behind_a_call_is_content(call: str, behind: str) -> None:
    for pieces in ([call, "\n", behind], list(f"{call}\n{behind}")):
        assert parsed(FORMATS["qwen3_coder"], pieces) == (behind, [("get", '{"a": 1}')], True)


@pytest.mark.parametrize(
    "behind", ["Then wait.", "</funct\n ion>", "<tool_call>", "<parameter=\n is > a", "<parameter=a<"]
)
def test_text_behind_arguments_that_never_end_is_content(behind: str) -> None:
    """It was held until the end, and lost."""
    text = f"<function=get><parameter=a>1</parameter>\n{behind}"
    for pieces in ([text], list(text)):
        assert parsed(FORMATS["qwen3_coder"], pieces) == (behind, [("get", '{"a": 1')], False)


@pytest.mark.parametrize(("opening", "value"), [("", '"5"'), ("<tool_call>", "5")])
def test_no_grammar_quotes_the_text_of_a_call_that_nothing_opens(opening: str, value: str) -> None:
    tools = {"get": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}}
    parser = CallParser(FORMATS["qwen3_coder"], tools, new_call_id=lambda: "id")
    _, calls = parser.feed(f"{opening}<function=get>\n<parameter=day>\n5\n</parameter>\n</function>")
    assert joined_calls(calls) == (ToolCall(call_id="id", name="get", arguments=f'{{"day": {value}}}'),)


def test_the_name_leaves_before_the_arguments_and_these_as_they_come() -> None:
    parser = CallParser(HERMES, TOOLS, new_call_id=lambda: "id")
    assert parser.feed('<tool_call>{"name": "get", "arguments": ') == ("", ())
    assert parser.feed('{"a"') == (
        "",
        (CallDelta(index=0, call_id="id", name="get"), CallDelta(index=0, arguments='{"a"')),
    )
    assert parser.feed(": 1}}") == ("", (CallDelta(index=0, arguments=": 1}"),))
    assert parser.has_calls
    assert parser.feed("\n</tool_call>") == ("", ())
    assert joined_calls([CallDelta(index=0, call_id="id", name="get")]) == (
        ToolCall(call_id="id", name="get", arguments=""),
    )


@pytest.mark.parametrize("tool_format", FORMATS.values())
def test_arguments_that_spell_code_are_text(tool_format: ToolFormat, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for code in (f"__import__('pathlib').Path({str(canary)!r}).touch()", "{{ cycler.__init__.__globals__ }}"):
        for arguments in (json.dumps({"a": code}), code):
            _, calls, _ = parsed(tool_format, [written(tool_format, [("get", arguments)])])
            assert all(arguments.startswith(found) for _, found in calls)
    assert not canary.exists()
