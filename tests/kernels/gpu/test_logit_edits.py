from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.logit_edits.launch import edit_logits
from kernels.logit_edits.reference import mask, penalize
from tests.kernels.gpu.conftest import DEVICE

ROWS, TABLE_ROWS = 5, 4


@pytest.mark.parametrize("vocab", [1, 33, 2048, 8191, 20_000])
def test_rows_are_masked_and_penalized_in_place_as_the_reference_does(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=draw) * 8
    logits[:, vocab // 2] = torch.nan
    is_allowed = torch.rand(2, vocab, generator=draw) < 0.5
    in_prompt = torch.rand(TABLE_ROWS, vocab, generator=draw) < 0.3
    counts = (torch.rand(TABLE_ROWS, vocab, generator=draw) * 5 - 2).clamp(min=0).int()
    # Rows of the logits, the tables and the masks. The second row is left as it is.
    places = [(3, 2, 1), (0, -1, 0), (4, 0, -1), (2, -1, -1)]
    knobs = [(1.3, 0.75, 2.0), (9.0, 9.0, 9.0), (0.5, -1.5, -0.5), (9.0, 9.0, 9.0)]
    expected = logits.double()
    mask(expected[3], is_allowed[1])
    mask(expected[0], is_allowed[0])
    for row, table, at in ((3, 2, 0), (4, 0, 2)):
        repetition, frequency, presence = (torch.tensor([[knob]], dtype=torch.float64) for knob in knobs[at])
        expected[row : row + 1] = penalize(
            expected[row : row + 1],
            in_prompt[table : table + 1],
            counts[table : table + 1],
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )
    # Tokens beyond the vocabulary are allowed, and must not be touched.
    padded = np.ones((2, -(-vocab // 64) * 64), dtype=bool)
    padded[:, :vocab] = is_allowed.numpy()
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    room = torch.full((ROWS + 1, vocab), 7.0)
    room[:ROWS] = logits
    room = room.to(DEVICE)
    edit_logits(
        room[:ROWS],
        torch.cat([torch.tensor(places), torch.tensor(knobs, dtype=torch.float64).view(torch.int64)], dim=1).to(DEVICE),
        words.to(DEVICE),
        in_prompt.to(DEVICE),
        counts.to(DEVICE),
    )
    found = room.cpu()
    torch.testing.assert_close(found[:ROWS].double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (found[ROWS] == 7).all()
    for row in (1, 2):
        assert torch.equal(found[row].view(torch.int32), logits[row].view(torch.int32))


def test_no_edits_launch_nothing() -> None:
    logits = torch.randn(2, 40, device=DEVICE)
    before = logits.clone()
    none = torch.zeros(0, 6, dtype=torch.int64, device=DEVICE)
    edit_logits(logits, none, none.int(), none.bool(), none.int())
    assert torch.equal(logits, before)
