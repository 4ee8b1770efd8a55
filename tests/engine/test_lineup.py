"""What rows ask for is looked up line by line, and anew only where a row has come or gone."""

from __future__ import annotations

import pytest
import torch

from engine.request import LzPenalty, SamplingParams
from engine.sampling import sampler as sampling
from engine.sampling.lineup import Lineup, draw_groups
from engine.sampling.sampler import Sampler
from tests.engine.test_sampler import make_params, make_request

VOCAB, CPU = 40, torch.device("cpu")
PARAMS = [
    make_params(temperature=0.0),
    make_params(num_logprobs=2, top_k=5),
    make_params(logit_bias=((3, 1.0),), min_tokens=2),
    make_params(frequency_penalty=1.0, top_p=0.5),
    make_params(lz=LzPenalty(strength=1.0), top_k=5, xtc_probability=0.5),
    make_params(logit_bias=((4, -2.0),), allowed_token_ids=(4, 5)),
    make_params(bad_words=((4,), (1, 2))),
]


def admitted(params: list[SamplingParams]) -> Sampler:
    sampler = Sampler(len(params), VOCAB, CPU, (2,))
    for row, asked in enumerate(params):
        sampler.admit(row, make_request(asked), [])
    return sampler


def test_each_line_is_where_it_asks() -> None:
    rows = [4, 2, 0, 3, 1, 5, 6]
    sampler = admitted(PARAMS)
    lineup = Lineup(rows, [sampler._state_by_row[row] for row in rows], VOCAB, CPU, has_simple=True)
    assert [lineup.told, lineup.masked, lineup.penalized] == [[4], [5, 6], [3]]
    assert [lineup.repeated, lineup.worded, lineup.delayed, lineup.followed] == [[0], [6], [1], [0, 6]]
    assert lineup.biased is not None
    assert [numbers.tolist() for numbers in lineup.biased] == [[1 * VOCAB + 3, 5 * VOCAB + 4], [1.0, -2.0]]
    assert lineup.groups == {5: [0, 4], 0: [1, 5, 6], VOCAB: [3]}


def test_no_piece_of_a_group_has_more_lines_than_are_drawn_at_once() -> None:
    states = [admitted(PARAMS)._state_by_row[row] for row in (1, 1, 3, 1)]
    lineup = Lineup(range(4), states, VOCAB, CPU, has_simple=True)
    assert list(lineup.pieces(2)) == [(5, [0, 1]), (5, [3]), (VOCAB, [2])]


def test_what_a_device_draws_at_once_is_in_no_group() -> None:
    assert draw_groups(PARAMS, VOCAB, has_simple=False) == {5: [4]}


@pytest.mark.parametrize(
    "asked",
    [
        {"top_n_sigma": 0.5},
        {"typical_p": 0.5},
        {"epsilon_cutoff": 0.5},
        {"eta_cutoff": 0.5},
        {"xtc_probability": 0.5},
    ],
)
def test_what_a_device_does_not_draw_is_in_a_group_whichever_truncation_asks_for_it(asked: dict[str, float]) -> None:
    assert draw_groups([make_params(), make_params(**asked)], VOCAB, has_simple=False) == {0: [1]}


def test_rows_that_go_on_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def counted(rows: list[int], *args: object, **named: object) -> Lineup:
        made.append(list(rows))
        return Lineup(rows, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(sampling, "Lineup", counted)
    sampler = admitted(PARAMS[:2])

    def step(rows: list[int], position: int) -> None:
        sampler.sample(torch.randn(len(rows), VOCAB), rows, [position] * len(rows))

    for position in (3, 4, 5):
        step([0, 1], position)
    step([1, 0], 6)
    sampler.release(1)
    sampler.admit(1, make_request(PARAMS[0]), [])
    step([1, 0], 7)
    assert made == [[0, 1], [1, 0], [1, 0]]
