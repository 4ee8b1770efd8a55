from __future__ import annotations

import torch

from engine.sampling.logits import scale


def test_a_tiny_temperature_is_nearly_greedy_and_overflows_nowhere() -> None:
    scores = scale(torch.tensor([[3.0, 4.0, -5.0]]), torch.tensor([[1e-45]]))
    assert scores[0, 1] == 0
    assert (scores[0, [0, 2]] < -1e20).all()
    assert not scores.isnan().any()
