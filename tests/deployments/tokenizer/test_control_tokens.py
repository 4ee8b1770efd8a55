"""A pattern of many words matches what their alternation from longest to shortest does, at a fraction of the cost."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.tokenizer.control_tokens import any_of

ALPHABET = st.sampled_from("ab<|.\n")
WORDS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=12)


def alternation(words: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")


def spans(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    return [found.span() for found in pattern.finditer(text)]


@settings(max_examples=500, deadline=None)
@given(words=WORDS, text=st.text(ALPHABET, max_size=40))
def test_the_longest_word_matches(words: list[str], text: str) -> None:
    assert spans(any_of(words), text) == spans(alternation(words), text)


def test_words_that_begin_alike_share_their_beginning() -> None:
    assert any_of(["<s>", "<s1>", "<s2>", "</s>", "[A]"]).pattern == r"(?:<(?:s(?:>|1>|2>)|/s>)|\[A\])"
    assert any_of(["a", "ab", "abc"]).pattern == "(?:a(?:b(?:c)?)?)"


def test_a_word_may_be_long() -> None:
    word = "x" * 5000
    assert any_of([word, word + "y"]).fullmatch(word + "y")


def test_many_words_with_one_beginning_are_one_alternative() -> None:
    """A message of "<" alone stopped a tokenizer with a thousand control tokens for 25 s."""
    assert any_of(f"<SPECIAL_{number}>" for number in range(1000)).pattern.count("<") == 1
