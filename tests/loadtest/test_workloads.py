from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workloads import (
    SHARED_SYSTEM_PROMPT,
    ChatMix,
    TokenRange,
    chat_asks,
    mixed_lengths,
    read_entries,
    token_ask,
    token_prompt,
    zipf_weights,
)

MIX = ChatMix(models=("base", "capitals", "json-answers"))


def asks(count: int, *, seed: int = 0, user: int = 0, mix: ChatMix = MIX) -> list[dict[str, object]]:
    return [ask.body for ask in islice(chat_asks(mix, read_entries(), seed=seed, user=user), count)]


def test_equal_seeds_ask_equal_things_and_users_differ() -> None:
    assert asks(20) == asks(20)
    assert asks(20) != asks(20, seed=1)
    assert asks(20) != asks(20, user=1)


def test_popular_names_are_asked_more_often() -> None:
    asked = Counter(body["model"] for body in asks(2000))
    assert asked["base"] > 1.5 * asked["capitals"] > 1.5 * asked["json-answers"] > 0


def test_an_exponent_of_zero_asks_evenly() -> None:
    assert zipf_weights(3, 0) == [1, 2, 3]
    assert zipf_weights(3, 1) == pytest.approx([1, 1.5, 1.5 + 1 / 3])


@given(st.integers(0, 1000), st.integers(40, 2000))
def test_a_chat_stays_inside_its_bounds(seed: int, max_chars: int) -> None:
    mix = ChatMix(models=("base",), max_prompt_chars=max_chars, min_answer_tokens=3, max_answer_tokens=7)
    for body in asks(5, seed=seed, mix=mix):
        *earlier, last = body["messages"]  # type: ignore[misc]
        question = last["content"]
        assert last["role"] == "user"
        assert sum(len(turn["content"]) for turn in earlier) <= max(0, max_chars - len(question))
        assert 3 <= body["max_tokens"] <= 7  # type: ignore[operator]


def test_the_shared_prefix_is_the_same_to_the_letter() -> None:
    always = ChatMix(models=("base",), shared_prefix_share=1.0)
    never = ChatMix(models=("base",), shared_prefix_share=0.0)
    assert all(body["messages"][0]["content"] == SHARED_SYSTEM_PROMPT for body in asks(10, mix=always))  # type: ignore[index]
    assert all(body["messages"][0]["role"] == "user" for body in asks(10, mix=never))  # type: ignore[index]


def test_lengths_of_conversations_are_mixed() -> None:
    assert len({len(body["messages"]) for body in asks(50)}) >= 4  # type: ignore[arg-type]


def test_entries_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "entries.jsonl"
    path.write_text('{"name": "a.b", "summary": "Does c.", "kind": "function"}\n\n')
    assert [(entry.name, entry.summary) for entry in read_entries(path)] == [("a.b", "Does c.")]


def test_token_prompts_have_their_length_and_range() -> None:
    prompt = token_prompt(64, seed=1, ids=TokenRange(start=5, end=9))
    assert len(prompt) == 64
    assert set(prompt) <= {5, 6, 7, 8}
    assert prompt == token_prompt(64, seed=1, ids=TokenRange(start=5, end=9))


def test_token_asks_carry_exactly_their_prompt() -> None:
    ask = token_ask("m", [1, 2], 8, workload="w")
    assert ask.body == {"model": "m", "prompt": [1, 2], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert "ignore_eos" not in token_ask("m", [1], 8, workload="w", ignore_eos=False).body


def test_mixed_lengths_span_their_ranges() -> None:
    lengths = mixed_lengths(500, seed=0)
    assert all(32 <= prompt <= 512 and 16 <= answer <= 256 for prompt, answer in lengths)
    assert min(prompt for prompt, _ in lengths) < 64 < 256 < max(prompt for prompt, _ in lengths)
