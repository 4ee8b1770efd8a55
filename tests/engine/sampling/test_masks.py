"""Masks as bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.masks import joint, mask, packed, unpacked

flags = st.lists(st.booleans(), min_size=1, max_size=40).map(lambda some: np.array(some, dtype=bool))


@given(is_allowed=flags, vocab_size=st.integers(1, 60))
def test_a_mask_is_what_it_was_made_of_and_allows_nothing_else(
    is_allowed: npt.NDArray[np.bool_], vocab_size: int
) -> None:
    found = unpacked(packed(is_allowed), vocab_size)
    expected = [bool(token < len(is_allowed) and is_allowed[token]) for token in range(vocab_size)]
    assert found.tolist() == expected


@given(first=flags, second=flags)
def test_both_of_two_masks_allow_what_their_joint_one_does(
    first: npt.NDArray[np.bool_], second: npt.NDArray[np.bool_]
) -> None:
    found = unpacked(joint(packed(first), packed(second)), 40)
    assert found.tolist() == (unpacked(packed(first), 40) & unpacked(packed(second), 40)).tolist()


def test_what_is_not_allowed_has_no_chance_and_what_is_not_a_number_stays_so() -> None:
    logits = torch.tensor([1.0, torch.nan, 3.0, torch.nan, 5.0])
    mask(logits, packed(np.array([True, True, False, False])))
    assert logits[[0, 2, 4]].tolist() == [1.0, -torch.inf, -torch.inf]
    assert logits[[1, 3]].isnan().all()
