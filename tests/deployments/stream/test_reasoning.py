"""However a text is cut into pieces, its thoughts and its content are the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.stream.reasoning import (
    MAX_SPACE,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    ReasoningCounter,
    ReasoningSplit,
    reasoning_of_template,
)


def split(pieces: Sequence[str], *, has_begun: bool = False) -> tuple[str, str]:
    reader = ReasoningSplit(THINK, has_begun=has_begun)
    found = [reader.feed(piece) for piece in pieces] + [reader.close()]
    return "".join(thoughts for thoughts, _ in found), "".join(content for _, content in found)


@pytest.mark.parametrize(
    ("text", "has_begun", "expected"),
    [
        ("<think>\nSo.\n</think>\n\nYes.", False, ("So.", "Yes.")),
        ("\nSo.\n</think>\n\nYes.", True, ("So.", "Yes.")),
        (" <think></think>Yes. ", False, ("", "Yes. ")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("<think>So", False, ("So", "")),
        ("<think>So </thi", False, ("So </thi", "")),
        ("<think>So \n", False, ("So", "")),
        ("<think>", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        ("Plain", False, ("", "Plain")),
        ("  ", False, ("", "  ")),
        ("\n ", True, ("", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
    ],
)
def test_thoughts_and_content_come_apart(text: str, has_begun: bool, expected: tuple[str, str]) -> None:
    assert split([text], has_begun=has_begun) == expected
    assert split(list(text), has_begun=has_begun) == expected


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "ink>", "\n", " ", "word", "<", "/", "</", "\n" * MAX_SPACE])
    ),
    has_begun=st.booleans(),
)
def test_cuts_change_nothing(pieces: list[str], has_begun: bool) -> None:
    assert split(pieces, has_begun=has_begun) == split(["".join(pieces)], has_begun=has_begun)


@pytest.mark.parametrize("begun", ["", "<think>", "<think>So.", "<think>So.</think>"])
def test_white_space_without_end_does_not_wait_for_a_mark(begun: str) -> None:
    """All of it was held and searched again with each token, for seconds where an answer had nothing else."""
    reader = ReasoningSplit(THINK, has_begun=False)
    reader.feed(begun)
    for _ in range(5 * MAX_SPACE):
        reader.feed("\n")
        assert reader.num_held <= MAX_SPACE


@pytest.mark.parametrize("num", [1, MAX_SPACE, MAX_SPACE + 1])
def test_little_white_space_around_thoughts_is_left_out(num: int) -> None:
    space = "\n" * num
    text = f"{space}<think>{space}So.{space}</think>{space}Yes."
    expected = ("So.", "Yes.") if num <= MAX_SPACE else ("", text)
    assert split([text]) == split(list(text)) == expected
    assert split([text[2 * num :]], has_begun=True)[1] == "Yes."


@pytest.mark.parametrize(
    ("tokens", "has_begun", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c"], False, 4),
        (["<th", "ink>", "a", "</", "think>\n", "c"], False, 5),
        (["a", "</think>", "c", "</think>"], True, 2),
        (["a", "b"], True, 2),
        (["a", "<think>", "b", "</think>"], False, 0),
        ([], True, 0),
    ],
)
def test_the_tokens_of_the_thoughts_are_counted(tokens: list[str], has_begun: bool, expected: int) -> None:
    counter = ReasoningCounter(THINK, has_begun=has_begun)
    for token in tokens:
        counter.feed(token)
    assert counter.num_tokens == expected


def test_the_template_shows_how_a_model_thinks() -> None:
    assert reasoning_of_template("{% if '</think>' in content %}") is THINK
    assert reasoning_of_template("[THINK]{{ x }}[/THINK]") is MISTRAL_THINK
    assert reasoning_of_template("{% if enable_thinking %}Think deeply.{% endif %}") is THINK
    assert reasoning_of_template("{% set end = '</seed:think>' %}{{ enable_thinking }}") is SEED_THINK
    assert reasoning_of_template("{{ messages }}") is None


@pytest.mark.parametrize("mark", ["<|channel>thought", "<|inner_prefix|>", "<|START_THINKING|>"])
def test_a_template_with_a_switch_and_other_marks_is_of_no_format(mark: str) -> None:
    """Gemma 4, Apertus and Command R7B were taken for models that write <think>."""
    template = "{% if not enable_thinking %}" + mark + "{% endif %}"
    assert reasoning_of_template(template) is None
    assert reasoning_of_template(template + "</think>") is THINK


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("{{ '<|im_start|>assistant\\n<think>' }}{% endif %}", THINK),
        ('{{- "<|im_start|>assistant\\n<think>\\n" -}}{% endif %}', THINK),
        ("<|assistant|>\n<think>\n{%- endif %}", THINK),
        ("<|assistant|>[THINK]{% endif %}", MISTRAL_THINK),
        ("{{ '<|assistant|>' }}{% endif %}", None),
        ("{{ 'Never write <think> or the like.<|assistant|>' }}{% endif %}", None),
    ],
)
def test_a_template_that_begins_the_answer_with_thoughts_need_not_show_their_end(
    prompt_end: str, expected: object
) -> None:
    """The thoughts of OLMo 3 were content."""
    turns = "{% if not system %}{{ 'You may think in <think>' }}{% endif %}{{ messages }}"
    assert reasoning_of_template(turns + "{% if add_generation_prompt %}" + prompt_end) is expected
    assert reasoning_of_template(turns + prompt_end) is None
