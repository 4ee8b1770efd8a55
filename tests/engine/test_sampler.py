from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placing import placed
from engine.request import DryPenalty, LzPenalty, Request, RequestId, SamplingParams
from engine.sampling.sampler import Sampler, SampleResult
from tests.oracles import naive_sampler

CPU = torch.device("cpu")
VOCAB = 50
EOS = (3,)


def make_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **changes})


def make_request(params: SamplingParams, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(request_id=RequestId("r"), prompt_ids=prompt, params=params)


def make_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_once(logits: torch.Tensor, params: list[SamplingParams], outputs: list[list[int]]) -> SampleResult:
    sampler = Sampler(len(params), logits.shape[1], CPU, EOS)
    for row, (item, output) in enumerate(zip(params, outputs, strict=True)):
        sampler.admit(row, make_request(item), output)
    return sampler.sample(logits.clone(), list(range(len(params))), [2 + len(output) for output in outputs])


PARAMS = st.builds(
    make_params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.35, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.5, 1.5]),
    typical_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    epsilon_cutoff=st.sampled_from([0.0, 0.0, 0.01, 0.9]),
    eta_cutoff=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.1]),
    dry=st.sampled_from([None, None, DryPenalty(multiplier=1.1, allowed_length=1, breakers=((7,),))]),
    lz=st.sampled_from([None, None, LzPenalty(strength=0.3, lookback=4)]),
    min_tokens=st.sampled_from([0, 0, 2, 9]),
    stop_token_ids=st.sampled_from([(), (7, 11), (10_000,)]),
)
ROWS = st.lists(st.tuples(PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 1000))
def test_a_batch_chooses_what_the_naive_sampler_chooses(
    rows: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    logits = make_logits(len(rows), seed)
    result = sample_once(logits, [row[0] for row in rows], [row[1] for row in rows])
    for line, (params, output) in enumerate(rows):
        in_vocab = tuple(i for i in params.stop_token_ids if i < VOCAB)
        naive = make_params(**{f: getattr(params, f) for f in params.__slots__ if f != "stop_token_ids"})  # type: ignore[attr-defined]
        expected = naive_sampler.choose(logits[line].tolist(), naive, (1, 2), output, (*EOS, *in_vocab))
        assert result.token_ids[line] == expected
    assert result.failed == {}


@settings(max_examples=40, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_result_and_alone_equals_in_a_crowd(
    rows: list[tuple[SamplingParams, list[int]]], random: object
) -> None:
    logits = make_logits(len(rows))
    whole = sample_once(logits, [r[0] for r in rows], [r[1] for r in rows]).token_ids
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = sample_once(logits[order], [rows[i][0] for i in order], [rows[i][1] for i in order]).token_ids
    assert shuffled == [whole[i] for i in order]
    alone = [sample_once(logits[i : i + 1], [rows[i][0]], [rows[i][1]]).token_ids[0] for i in order]
    assert alone == shuffled


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"top_n_sigma": 1.0},
        {"typical_p": 0.6},
        {"epsilon_cutoff": 0.05},
        {"eta_cutoff": 0.1},
    ],
)
def test_draws_follow_the_distribution(changes: dict[str, float]) -> None:
    draws, batch, vocab = 20_000, 2_000, 20
    logits = make_logits(1, seed=5, vocab=vocab) / 2
    params = make_params(seed=0, **changes)
    sampler = Sampler(batch, vocab, CPU, ())
    counts = torch.zeros(vocab)
    for start in range(0, draws, batch):
        for row in range(batch):
            sampler.admit(row, make_request(make_params(seed=start + row, **changes)), [])
        result = sampler.sample(logits.repeat(batch, 1), range(batch), [2] * batch)
        counts += torch.bincount(torch.tensor(result.token_ids), minlength=vocab)
    kept = naive_sampler.kept(logits[0].tolist(), params)
    expected = torch.zeros(vocab)
    expected[kept] = torch.softmax(logits[0, kept] / params.temperature, -1) * draws
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = len(kept) - 1
    # Wilson and Hilferty: beyond this bound with probability 1e-4; the seeds are fixed.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def test_consecutive_positions_of_one_seed_are_independent_draws() -> None:
    positions, vocab = 20_000, 8
    sampler = Sampler(1, vocab, CPU, ())
    sampler.admit(0, make_request(make_params(seed=42)), [])
    # One call for each position would be slow: rows of one seed stand in for them.
    wide = Sampler(positions, vocab, CPU, ())
    for row in range(positions):
        wide.admit(row, make_request(make_params(seed=42)), [])
    ids = wide.sample(torch.zeros(positions, vocab), range(positions), list(range(2, positions + 2))).token_ids
    assert ids[5] == sampler.sample(torch.zeros(1, vocab), [0], [7]).token_ids[0]
    pairs = torch.bincount(torch.tensor(ids[:-1]) * vocab + torch.tensor(ids[1:]), minlength=vocab * vocab).float()
    mean = (positions - 1) / vocab**2
    chi_square = ((pairs - mean) ** 2 / mean).sum().item()
    assert chi_square < 63 + 3.72 * math.sqrt(2 * 63) + 10


def test_a_resumed_generation_goes_on_as_the_unbroken_one() -> None:
    params = make_params(
        seed=9, temperature=0.8, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.4,
        dry=DryPenalty(multiplier=0.9, allowed_length=1, breakers=((3,), (8, 9))),
        lz=LzPenalty(strength=0.5, lookback=4),
    )  # fmt: skip

    def continue_from(output: list[int], steps: int) -> list[int]:
        sampler = Sampler(4, VOCAB, CPU, EOS)
        sampler.admit(2, make_request(params), list(output))
        output = list(output)
        for _ in range(steps):
            position = 2 + len(output)
            output += sampler.sample(make_logits(1, seed=position), [2], [position]).token_ids
        return output

    whole = continue_from([], 12)
    assert continue_from(whole[:5], 7) == whole


def test_only_the_row_without_finite_logits_fails() -> None:
    params = [make_params(temperature=0), make_params(top_k=4), make_params(top_p=0.5), make_params(temperature=0)]
    logits = make_logits(4)
    logits[1, 6] = torch.nan
    logits[2] = -torch.inf
    sampler = Sampler(10, VOCAB, CPU, EOS)
    for row, item in zip((9, 4, 7, 0), params, strict=True):
        sampler.admit(row, make_request(item), [])
    result = sampler.sample(logits.clone(), [9, 4, 7, 0], [2, 2, 2, 2])
    assert set(result.failed) == {4, 7}
    assert result.token_ids == [int(logits[0].argmax()), -1, -1, int(logits[3].argmax())]


def test_an_infinite_logit_fails_even_a_penalized_row_and_its_count_stays_right() -> None:
    sampler = Sampler(1, VOCAB, CPU, EOS)
    sampler.admit(0, make_request(make_params(temperature=0, frequency_penalty=1.0)), [])
    logits = make_logits(1)
    logits[0, 8] = torch.inf
    assert sampler.sample(logits, [0], [2]).failed.keys() == {0}
    flat = torch.zeros(1, VOCAB)
    flat[0, 5] = 0.5
    assert [sampler.sample(flat.clone(), [0], [3 + i]).token_ids[0] for i in range(2)] == [5, 0]


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_counts_where_it_is_the_only_one(name: str) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 2.0, 1.5
    for value, expected in ((2.0, 4), (1.0 if name == "repetition_penalty" else 0.0, 3)):
        params = make_params(temperature=0.0, **{name: value})
        assert sample_once(logits, [params], [[3]]).token_ids == [expected]


def test_min_tokens_masks_end_and_stop_ids_until_enough_are_out() -> None:
    sampler = Sampler(1, VOCAB, CPU, EOS)
    sampler.admit(0, make_request(make_params(temperature=0, min_tokens=2, stop_token_ids=(4,))), [])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 9.0, 8.0, 7.0
    drawn = [sampler.sample(logits.clone(), [0], [position]).token_ids[0] for position in (2, 3, 4)]
    assert drawn == [5, 5, 3]


def test_a_row_given_to_another_request_keeps_nothing_of_the_first() -> None:
    sampler = Sampler(1, VOCAB, CPU, EOS)
    penalty = make_params(temperature=0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    sampler.admit(0, make_request(penalty), [5])
    assert sampler.sample(logits.clone(), [0], [3]).token_ids == [0]
    sampler.release(0)
    sampler.admit(0, make_request(penalty), [])
    assert sampler.sample(logits.clone(), [0], [2]).token_ids == [5]


def test_a_request_that_is_admitted_to_its_row_again_has_its_prompt_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, read = tuple(range(1, 30)), list[int]()
    penalty = make_params(temperature=0, repetition_penalty=1e9)
    one, other = make_request(penalty, prompt), make_request(penalty, tuple(range(20)))

    def counted(values: Sequence[Any], *args: Any) -> torch.Tensor:
        read.append(len(values))
        return placed(values, *args)

    monkeypatch.setattr("engine.sampling.sampler.placed", counted)
    sampler, logits = Sampler(2, VOCAB, CPU, EOS), torch.arange(VOCAB, 0.0, -1).expand(1, VOCAB)
    plain = make_request(make_params(temperature=0), prompt)
    chosen = []
    for request, output in ((one, []), (one, [0]), (one, [0, 30]), (other, []), (plain, []), (one, [])):
        sampler.admit(0, request, output)
        chosen += sampler.sample(logits.clone(), [0], [len(request.prompt_ids) + len(output)]).token_ids
    # The least penalized of the likeliest: what neither prompt nor output has.
    assert chosen == [0, 30, 31, 20, 0, 0]
    assert read.count(len(prompt)) == 2
    assert read.count(len(other.prompt_ids)) == 1


def test_an_all_greedy_batch_computes_one_maximum_and_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a greedy row drew")

    monkeypatch.setattr("engine.sampling.sampler._draw", forbidden)
    monkeypatch.setattr("engine.sampling.sampler.penalize", forbidden)
    logits = make_logits(3)
    params = [make_params(temperature=0, top_k=5, top_p=0.1)] * 3
    assert sample_once(logits, params, [[], [], []]).token_ids == logits.argmax(-1).tolist()


def test_an_empty_batch_gives_an_empty_result() -> None:
    assert Sampler(1, VOCAB, CPU, EOS).sample(torch.empty(0, VOCAB), [], []) == SampleResult(token_ids=[])
