from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.prompt_lookup import MAX_TOKENS, NUM_GRAM, PromptLookup

IDS = st.lists(st.integers(0, 3), max_size=60)


def slow_draft(ids: list[int], count: int) -> list[int]:
    """Go backwards through the text for the last tokens, and on from there."""
    gram = ids[-NUM_GRAM:]
    for end in range(len(ids) - 1, NUM_GRAM - 1, -1):
        if ids[end - NUM_GRAM : end] == gram:
            draft = list(ids)
            for at in range(count):
                draft.append(draft[end + at])
            return draft[len(ids) :]
    return []


@given(IDS, IDS, st.integers(1, 9))
def test_a_draft_is_what_followed_the_newest_place_like_the_end(prompt: list[int], output: list[int], n: int) -> None:
    lookup = PromptLookup(prompt, len(output))
    for count in range(len(output) + 1):
        # Two n-grams may share a place of the table; then the older one is not found.
        found = lookup.draft(n)
        assert found in ([], slow_draft(prompt + output[:count], n))
        if count < len(output):
            lookup.push(output[count])


def test_nearly_all_are_found() -> None:
    prompt = [i * 7919 % 49152 for i in range(3000)]
    lookup = PromptLookup(prompt, 2000)
    hits = 0
    for token_id in prompt[1000:2000]:
        hits += lookup.draft(4)[:1] == [token_id]
        lookup.push(token_id)
    assert hits > 850


def test_a_repeat_under_way_goes_on() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 2, 3, 4], 10)
    assert lookup.draft(8) == [2, 3, 4, 2, 3, 4, 2, 3]


def test_of_a_long_text_the_table_stays_small_and_the_end_is_known() -> None:
    lookup = PromptLookup(range(10 * MAX_TOKENS), 10**6)
    assert len(lookup._end_by_hash) <= 8 * MAX_TOKENS
    for token_id in (10 * MAX_TOKENS - 9, 10 * MAX_TOKENS - 8, 10 * MAX_TOKENS - 7):
        lookup.push(token_id)
    assert lookup.draft(2) == [10 * MAX_TOKENS - 6, 10 * MAX_TOKENS - 5]


def test_short_texts_have_no_drafts() -> None:
    for length in range(NUM_GRAM + 1):
        assert PromptLookup([7] * length, 5).draft(4) == []
    assert PromptLookup([7] * (NUM_GRAM + 1), 5).draft(4) == [7] * 4
