from __future__ import annotations

import torch

from engine.attention import chunk_mask


def test_a_chunk_sees_itself_and_what_came_before() -> None:
    mask = chunk_mask(2, 4, torch.device("cpu"))
    assert mask is not None
    assert mask.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_a_chunk_at_the_beginning_needs_no_mask() -> None:
    assert chunk_mask(0, 5, torch.device("cpu")) is None
