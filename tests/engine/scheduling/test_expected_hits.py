from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.request import Pooling, RequestId
from engine.scheduling.expected_hits import ExpectedHits
from tests.engine.scripted import a_config, a_request

BLOCK = 4
PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=17), min_size=1, max_size=8)


def common(first: list[int], second: list[int]) -> int:
    """Whole blocks of tokens with which both begin."""
    count = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return count // BLOCK * BLOCK


@given(prompts=PROMPTS, num_cached=st.integers(0, 3))
def test_each_computes_what_neither_the_cache_nor_any_before_it_holds(
    prompts: list[list[int]], num_cached: int
) -> None:
    hits = ExpectedHits(a_config(block_tokens=BLOCK), lambda names: min(len(names), num_cached))
    for place, prompt in enumerate(prompts):
        request = a_request(str(place), prompt)
        outlook = hits.look(request)
        shared = max([num_cached * BLOCK, *(common(prompt, other) for other in prompts[:place])])
        assert outlook.num_own == len(prompt) - min(shared, (len(prompt) - 1) // BLOCK * BLOCK)
        assert outlook.num_missing == len(prompt) - min(num_cached, (len(prompt) - 1) // BLOCK) * BLOCK
        hits.add(request, outlook)
    for first, second in pairwise(range(len(prompts))):
        names = [hits.look(a_request(str(place), prompts[place])).names for place in (first, second)]
        shared = common(prompts[first], prompts[second])
        for start in range(len(prompts[first])):
            assert hits.num_common(*names, start) == max(0, shared - start)
    for place in range(len(prompts)):
        hits.end(RequestId(str(place)))
        hits.end(RequestId(str(place)))
    assert not hits._coming
    assert not hits._outlooks


def test_who_needs_every_token_computes_them_and_leaves_them_to_others() -> None:
    hits = ExpectedHits(a_config(block_tokens=BLOCK), lambda names: len(names))
    for fields in ({"num_prompt_logprobs": 0}, {"pooling": Pooling.MEAN}):
        outlook = hits.look(a_request("whole", range(1, 10), **fields))
        assert (outlook.num_own, outlook.num_missing, outlook.reuses, len(outlook.names)) == (9, 9, False, 2)


def test_nothing_is_expected_where_nothing_is_shared() -> None:
    """Without a prefix cache; and of layers with states, only what the cache holds: few states are kept."""
    hits = ExpectedHits(a_config(block_tokens=BLOCK, enable_prefix_cache=False), lambda names: len(names))
    assert hits.look(a_request("r", range(1, 10))).num_own == 9
    hits = ExpectedHits(a_config(block_tokens=BLOCK, num_snapshots=4), lambda names: 0)
    first = a_request("first", range(1, 10))
    hits.add(first, hits.look(first))
    second = hits.look(a_request("second", range(1, 10)))
    assert second.num_own == 9
    assert hits.num_common(second.names, hits.look(first).names, 0) == 0


def test_names_are_those_of_the_tokens_whoever_had_the_id() -> None:
    hits = ExpectedHits(a_config(block_tokens=BLOCK), lambda names: 0)
    first = a_request("r", range(1, 10))
    hits.add(first, hits.look(first))
    assert hits.look(first) is hits.look(first)
    assert hits.look(a_request("r", range(2, 11))).names[0] != hits.look(first).names[0]
