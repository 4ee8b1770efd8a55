"""Requests that ask again and again for more beginnings than the cache holds get what each would get alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted import Harness, a_config, a_request
from tests.engine.scripted_mover import ScriptedMover
from tests.oracles.naive_scheduler import answer_alone

pytestmark = pytest.mark.usefixtures("small_tiles")

STEMS = [tuple((7 * i + j) % 20 for j in range(12)) for i in range(6)]

movers = st.builds(
    ScriptedMover,
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    steps=st.integers(0, 5),
    losing=st.sampled_from([0, 0, 5]),
)
asked = st.tuples(
    st.sampled_from(STEMS), st.integers(6, 12), st.lists(st.integers(0, 19), max_size=3), st.integers(0, 3)
)
"""A beginning, how much of it, what follows, and steps until the next one."""


@given(
    mover=movers,
    requests=st.lists(asked, min_size=8, max_size=20),
    block_tokens=st.sampled_from([1, 2, 4]),
    num_seqs=st.integers(1, 4),
    steps_ahead=st.integers(0, 1),
    windows=st.sampled_from([(0,), (0, 3), (0, 5, 5), (4,)]),
)
def test_answers_do_not_depend_on_tiers(
    mover: ScriptedMover,
    requests: list[tuple[tuple[int, ...], int, list[int], int]],
    block_tokens: int,
    num_seqs: int,
    steps_ahead: int,
    windows: tuple[int, ...],
) -> None:
    longest = 20
    per_request = -(-longest // block_tokens)
    config = a_config(
        max_model_len=longest,
        max_num_seqs=num_seqs,
        block_tokens=block_tokens,
        num_blocks=2 * per_request * len(windows),
        windows=windows,
        max_blocks_per_request=per_request,
        max_queued_requests=100,
    )
    harness = Harness(config, mover=mover, steps_ahead=steps_ahead)
    made = {}
    for number, (stem, count, tail, steps) in enumerate(requests):
        made[f"r{number}"] = request = a_request(f"r{number}", (*stem[:count], *tail), max_tokens=3)
        harness.add(request)
        for _ in range(steps):
            harness.step()
    harness.finish()
    for name, request in made.items():
        assert harness.tokens(name) == answer_alone(request, longest).token_ids
    # Once more, one after the other: by now there is something below.
    for name, request in made.items():
        harness.add(replace(request, request_id=f"{name}-again"))
        harness.finish()
        assert harness.tokens(f"{name}-again") == answer_alone(request, longest).token_ids
