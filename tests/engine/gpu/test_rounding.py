"""Inputs of 8 bits are rounded once, by who makes them where that is one of ours, and never taken for another's."""

from __future__ import annotations

import pytest
import torch

from engine.gpu import rounding
from engine.gpu.rounding import InputRounding
from kernels.add_rms_norm.reference import add_rms_norm
from kernels.row_quantization.launch import Rounded, quantize_rows
from tests.kernels.gpu.conftest import DEVICE

FP8 = torch.float8_e4m3fn
ROWS, WIDTH = 4, 32


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was rounded by a launch of its own."""
    rounded: list[torch.Tensor] = []

    def counted(x: torch.Tensor, dtype: torch.dtype) -> Rounded:
        rounded.append(x)
        return quantize_rows(x, dtype)

    monkeypatch.setattr(rounding, "quantize_rows", counted)
    return rounded


def assert_rounded(found: Rounded, x: torch.Tensor) -> None:
    for part, expected in zip(found, quantize_rows(x, FP8), strict=True):
        assert torch.equal(part.float(), expected.float())


def numbers(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, device=DEVICE)


def test_a_norm_and_an_activation_leave_their_rows_for_the_next_product(launches: list[torch.Tensor]) -> None:
    inputs = InputRounding(is_wanted=True)
    h = inputs.add_rms_norm(numbers(), None, numbers(1)[0], 1e-6, is_final=True)
    assert_rounded(inputs.take(h), h)
    gated = inputs.activate_and_multiply(numbers(width=2 * WIDTH), "silu")
    assert_rounded(inputs.take(gated), gated)
    assert launches == []


def test_what_comes_from_elsewhere_or_may_yet_change_is_rounded_when_it_is_read(launches: list[torch.Tensor]) -> None:
    inputs = InputRounding(is_wanted=True)
    kept = inputs.add_rms_norm(numbers(), None, numbers(1)[0], 1e-6, is_final=True)
    other = numbers()
    assert_rounded(inputs.take(other), other)
    # Asked for once: afterwards its memory may be another's.
    assert_rounded(inputs.take(kept), kept)
    changed = inputs.add_rms_norm(numbers(), None, numbers(1)[0], 1e-6, is_final=False)
    changed *= 2
    assert_rounded(inputs.take(changed), changed)
    assert [id(x) for x in launches] == [id(other), id(kept), id(changed)]


def test_an_activation_that_is_too_wide_for_it_leaves_its_rounding_to_another(
    launches: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "MAX_ROUNDED_WIDTH", WIDTH - 1)
    inputs = InputRounding(is_wanted=True)
    gated = inputs.activate_and_multiply(numbers(width=2 * WIDTH), "silu")
    assert_rounded(inputs.take(gated), gated)
    assert len(launches) == 1


@pytest.mark.parametrize(("is_wanted", "rows"), [(False, ROWS), (True, 2)])
def test_nothing_is_rounded_that_nobody_reads(launches: list[torch.Tensor], is_wanted: bool, rows: int) -> None:
    inputs = InputRounding(is_wanted=is_wanted)
    x, weight = numbers(rows), numbers(1)[0]
    h = inputs.add_rms_norm(x, None, weight, 1e-6, is_final=True)
    torch.testing.assert_close(h, add_rms_norm(x, None, weight, 1e-6))
    inputs.take(h)
    assert len(launches) == 1
