from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import DryPenalty, LzPenalty
from engine.sampling import repeats
from engine.sampling.repeats import MAX_PENALTY, DryRow, LzRow, RepeatPenalties, SuffixMatches
from engine.sampling.sampler import Sampler
from tests.engine.test_sampler import CPU, make_params, make_request
from tests.oracles import naive_repeats

VOCAB = 100
# Few kinds of tokens, so that most sequences repeat themselves.
TOKENS = st.lists(st.integers(0, 3), max_size=40)
BREAKERS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
DRY = st.builds(
    DryPenalty,
    multiplier=st.sampled_from([0.5, 1.0]),
    base=st.sampled_from([1.0, 1.75]),
    allowed_length=st.integers(1, 4),
    last_n=st.sampled_from([-1, -1, 0, 1, 2, 7, 100]),
    breakers=BREAKERS,
)
LZ = st.builds(LzPenalty, strength=st.just(0.25), buffer=st.integers(1, 5), lookback=st.sampled_from([1, 2, 9, 100]))


def lost(row: DryRow | LzRow) -> dict[int, float]:
    token_ids, taken = row.edits()
    assert len(set(token_ids.tolist())) == len(token_ids)
    return dict(zip(token_ids.tolist(), taken.tolist(), strict=True))


def longest_common_suffix(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return length


@given(TOKENS, TOKENS)
def test_lengths_are_those_of_common_suffixes_whenever_it_began(before: list[int], after: list[int]) -> None:
    matches, whole = SuffixMatches(before), [*before, *after]
    for token_id in after:
        matches.push([token_id])
    assert matches.ids.tolist() == whole
    expected = [longest_common_suffix(whole[: place + 1], whole) for place in range(len(whole) - 1)]
    assert matches.lengths.tolist() == expected == SuffixMatches(whole).lengths.tolist()


@settings(max_examples=300)
@given(DRY, TOKENS, TOKENS)
def test_dry_takes_what_comparing_everything_takes(penalty: DryPenalty, before: list[int], after: list[int]) -> None:
    row = DryRow(penalty, VOCAB, before)
    for place in range(len(after) + 1):
        assert lost(row) == pytest.approx(naive_repeats.dry(penalty, [*before, *after[:place]]))
        if place < len(after):
            row.note([after[place]])


@settings(max_examples=300)
@given(LZ, TOKENS, TOKENS)
def test_lz_takes_what_comparing_everything_takes(penalty: LzPenalty, before: list[int], after: list[int]) -> None:
    row = LzRow(penalty, VOCAB, before)
    for place in range(len(after) + 1):
        assert lost(row) == pytest.approx(naive_repeats.lz(penalty, [*before, *after[:place]], VOCAB))
        if place < len(after):
            row.note([after[place]])


@settings(max_examples=300)
@given(DRY, LZ, TOKENS, st.lists(TOKENS, max_size=3), st.sampled_from([1, 5, 100]))
def test_tokens_may_come_several_at_once(
    dry: DryPenalty, lz: LzPenalty, before: list[int], pieces: list[list[int]], many: int
) -> None:
    dry_row, lz_row, whole = DryRow(dry, VOCAB, before), LzRow(lz, VOCAB, before), before
    with patch.object(repeats, "MANY_TOKENS", many):
        for piece in pieces:
            whole = [*whole, *piece]
            dry_row.note(piece)
            lz_row.note(piece)
            assert lost(dry_row) == pytest.approx(naive_repeats.dry(dry, whole))
            assert lost(lz_row) == pytest.approx(naive_repeats.lz(lz, whole, VOCAB))


def test_dry_grows_with_the_repeat_and_spares_what_a_breaker_parts() -> None:
    repeat = [5, 6, 7, 8, 9, 5, 6, 7]
    assert lost(DryRow(DryPenalty(multiplier=0.8), VOCAB, repeat)) == pytest.approx({8: 0.8 * 1.75})
    assert lost(DryRow(DryPenalty(multiplier=0.8, allowed_length=4), VOCAB, repeat)) == {}
    assert lost(DryRow(DryPenalty(multiplier=0.8, breakers=((6,),)), VOCAB, repeat)) == {}
    assert lost(DryRow(DryPenalty(multiplier=0.8, breakers=((5,),)), VOCAB, repeat)) == pytest.approx({8: 0.8})
    assert lost(DryRow(DryPenalty(multiplier=0.8, breakers=((8,),)), VOCAB, repeat)) == {}
    assert lost(DryRow(DryPenalty(multiplier=0.8, breakers=((5, 6),)), VOCAB, repeat)) == {}
    assert lost(DryRow(DryPenalty(multiplier=0.8, allowed_length=1, breakers=((5, 6),)), VOCAB, repeat)) == {8: 0.8}
    # A tokenizer may know more tokens than the model has logits.
    wide = DryPenalty(multiplier=0.8, breakers=((VOCAB,), (5, VOCAB)))
    assert lost(DryRow(wide, VOCAB, repeat)) == lost(DryRow(DryPenalty(multiplier=0.8), VOCAB, repeat))


def test_the_bits_that_lz_saves_are_fewer_the_farther_the_match() -> None:
    penalty = LzPenalty(strength=0.5)
    # 7 came after a match of two tokens, three places back; 6 lies one place back and 5 two, after no match.
    found = lost(LzRow(penalty, 64, [5, 6, 7, 5, 6]))
    assert found == pytest.approx({7: 0.5 * (6 - np.log2(3)), 6: 0.5 * 6, 5: 0.5 * 5})
    assert lost(LzRow(penalty, 4, list(range(8))))[0] == 0, "what is farther than the vocabulary is wide costs nothing"


def test_an_endless_repeat_takes_a_finite_penalty() -> None:
    token_ids, taken = DryRow(DryPenalty(multiplier=1.0, base=10.0), VOCAB, [1] * 1000).edits()
    assert token_ids.tolist() == [1]
    assert taken.tolist() == [MAX_PENALTY]
    logits = torch.zeros(4)
    request = make_request(make_params(dry=DryPenalty(multiplier=1.0, base=10.0)), prompt=(1,) * 1000)
    repeats = RepeatPenalties.of(request, 4, [])
    assert repeats is not None
    repeats.apply(logits)
    assert logits.isfinite().all()


def test_the_next_step_waits_for_the_tokens_that_they_look_at() -> None:
    assert make_params(dry=DryPenalty(multiplier=1.0)).is_followed
    assert make_params(lz=LzPenalty(strength=1.0)).is_followed
    assert make_params(bad_words=((1, 2),)).is_followed
    assert make_params(grammar="%json {}").is_followed
    assert not make_params(repetition_penalty=2.0, bad_words=((1,),)).is_followed


def test_a_request_without_them_keeps_nothing() -> None:
    assert RepeatPenalties.of(make_request(make_params()), 4, [1, 2]) is None


def test_draws_follow_the_penalised_distribution() -> None:
    draws, vocab = 4_000, 6
    prompt, output = (1, 2, 3, 4, 1, 2), [3]
    dry, lz = DryPenalty(multiplier=0.7, base=1.5), LzPenalty(strength=0.4)
    logits = torch.tensor([[0.3, -0.2, 0.1, 0.9, 1.2, 0.0]])
    sampler = Sampler(draws, vocab, CPU, ())
    for row in range(draws):
        sampler.admit(row, make_request(make_params(seed=row, dry=dry, lz=lz), prompt), output)
    drawn = sampler.sample(logits.repeat(draws, 1), range(draws), [7] * draws).token_ids
    lost_by_token = naive_repeats.dry(dry, [*prompt, *output]), naive_repeats.lz(lz, output, vocab)
    assert [set(found) for found in lost_by_token] == [{4}, {3}]
    expected = logits[0].clone()
    for found in lost_by_token:
        for token_id, loss in found.items():
            expected[token_id] -= loss
    counts = torch.bincount(torch.tensor(drawn), minlength=vocab)
    wanted = torch.softmax(expected, -1) * draws
    # Five degrees of freedom; beyond this with probability 1e-4, and the seeds are fixed.
    assert ((counts - wanted) ** 2 / wanted).sum().item() < 25.7


def test_a_long_prompt_begins_in_linear_time() -> None:
    """Where every token is the same, comparing everything with everything would take hours."""
    assert SuffixMatches([1] * 200_000).lengths[:3].tolist() == [1, 2, 3]


def test_many_tokens_at_once_take_linear_time() -> None:
    """A grammar such as `a{100000}` forces them, and one by one they would hold up all other answers for a minute."""
    row = DryRow(DryPenalty(multiplier=1.0), VOCAB, [2])
    row.note([1] * 200_000)
    assert lost(row).keys() == {1}
