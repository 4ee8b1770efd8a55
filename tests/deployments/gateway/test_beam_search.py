from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway.beam_search import BeamSearch
from engine.request import TokenLogprobs

VOCAB = 4


def expansion_of(front: tuple[int, ...], seed: int, count: int) -> TokenLogprobs:
    """What a made-up model thinks of the next place: any numbers, the same for the same front."""
    weights = [1 + hash((seed, *front, token)) % 97 for token in range(VOCAB)]
    logprobs = {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}
    return TokenLogprobs(0.0, tuple(sorted(logprobs.items(), key=lambda pair: -pair[1])[:count]))


def run(search: BeamSearch, seed: int) -> None:
    while search.open:
        search.advance([expansion_of(beam.token_ids, seed, search.num_expansions) for beam in search.open])


@given(st.integers(0, 999), st.integers(1, 3))
def test_a_search_as_wide_as_all_there_is_finds_the_best(seed: int, length: int) -> None:
    every = VOCAB**length
    search = BeamSearch(every, max_tokens=length, length_penalty=1.0, ends=frozenset(), num_top=2)
    run(search, seed)
    logprob = {
        ids: sum(dict(expansion_of(ids[:at], seed, VOCAB).top)[token] for at, token in enumerate(ids))
        for ids in itertools.product(range(VOCAB), repeat=length)
    }
    assert len(search.found) == every
    for beam in search.found:
        assert math.isclose(beam.logprob, logprob[beam.token_ids])
        assert math.isclose(beam.logprob, sum(score.logprob for score in beam.scores))
        assert all(len(score.top) == 2 for score in beam.scores)
    assert [beam.logprob for beam in search.found] == sorted((b.logprob for b in search.found), reverse=True)


@given(st.integers(0, 999))
def test_one_beam_is_greedy(seed: int) -> None:
    search = BeamSearch(1, max_tokens=5, length_penalty=1.0, ends=frozenset())
    run(search, seed)
    greedy: tuple[int, ...] = ()
    for _ in range(5):
        greedy += (expansion_of(greedy, seed, 1).top[0][0],)
    assert [beam.token_ids for beam in search.found] == [greedy]


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_what_is_found_ends_once_and_is_ordered_by_its_score(seed: int, width: int, length_penalty: float) -> None:
    ends = frozenset({0})
    search = BeamSearch(width, max_tokens=6, length_penalty=length_penalty, ends=ends)
    run(search, seed)
    assert len(search.found) == width
    assert len({beam.token_ids for beam in search.found}) == width
    scores = []
    for beam in search.found:
        assert ends.isdisjoint(beam.token_ids[:-1])
        assert beam.token_ids[-1] in ends or len(beam.token_ids) == 6
        scores.append(beam.logprob / len(beam.token_ids) ** length_penalty)
    assert scores == sorted(scores, reverse=True)
