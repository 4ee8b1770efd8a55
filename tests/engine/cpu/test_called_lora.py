"""Adapters by our kernels called one by one change products as torch's operators do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from adapters.weights import AdapterWeights, Columns, Extras, RawAdapter, RawProjection
from engine.adapter_tables import ENTRIES
from engine.cpu.called_backend import CalledBackend
from engine.cpu.called_lora import CalledLora
from engine.cpu.native_lora import PanelAdapter
from engine.errors import EngineError
from engine.lora import AdapterSegment, LoraBatch
from kernels.native import NativeKernels
from kernels.program import Pool

OTHER = "linear_attn.in_proj_z"
OWN_ENTRIES = (*ENTRIES, OTHER)
IN, WIDTHS = 40, {"q_proj": 48, "k_proj": 17, "v_proj": 17, "o_proj": 33, OTHER: 50}
TARGETS: Sequence[tuple[int, Sequence[str]]] = (
    (8, ("q_proj", "k_proj", "v_proj", "o_proj", OTHER)),
    (3, ("k_proj", OTHER)),
    (1, ("q_proj", "v_proj")),
)
"""Ranks and modules of three adapters, in layer 1 of two."""
SPANS = ((0, 1), (1, 2), (2, 30))


def adapter(rank: int, modules: Sequence[str], dtype: torch.dtype) -> RawAdapter:
    projections = {
        (1, name): RawProjection(a=torch.randn(rank, IN).to(dtype), b=torch.randn(WIDTHS[name], rank), scaling=0.5)
        for name in modules
    }
    gain, shift = torch.rand(WIDTHS["o_proj"]) + 0.5, torch.randn(WIDTHS["o_proj"])
    columns = {(1, "o_proj"): Columns(gain=gain, shift=shift)} if rank == 3 else {}
    return RawAdapter(projections=projections, dtype=dtype, extras=Extras(columns=columns))


def both(kernels: NativeKernels, dtype: torch.dtype) -> tuple[list[AdapterSegment], list[AdapterSegment]]:
    """Return the segments of a step of 32 tokens, for torch's operators and for our kernels."""
    torch.manual_seed(6)
    raws = [adapter(rank, modules, dtype) for rank, modules in TARGETS]
    plain: list[AdapterWeights] = [raw.scaled() for raw in raws]
    laid_out = [PanelAdapter(raw, 2, kernels, entries=OWN_ENTRIES) for raw in raws]
    made = [
        [
            AdapterSegment(weights=weights, start=start, end=end)
            for weights, (start, end) in zip(every, SPANS, strict=True)
        ]
        for every in (plain, laid_out)
    ]
    return made[0], made[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("modules", [("q_proj", "k_proj", "v_proj"), ("o_proj",), (OTHER,)])
@pytest.mark.parametrize("part", [(0, 32), (1, 7), (31, 32)])
def test_products_are_changed_as_by_torch(
    kernels: NativeKernels, dtype: torch.dtype, modules: Sequence[str], part: tuple[int, int]
) -> None:
    plain, laid_out = both(kernels, dtype)
    backend = CalledBackend(Pool(kernels, 2), dtype, entries=OWN_ENTRIES)
    ours = backend.lora(laid_out)
    assert isinstance(ours, CalledLora)
    splits = [WIDTHS[name] for name in modules]
    x, weight = torch.randn(part[1] - part[0], IN).to(dtype), torch.randn(sum(splits), IN).to(dtype)
    found, expected = (
        lora.of_tokens(*part).multiply(lambda x: x @ weight.T, x, 1, modules, splits).double()
        for lora in (ours, LoraBatch(plain))
    )
    assert (found - expected).norm() < (1e-5 if dtype is torch.float32 else 0.01) * expected.norm()


def test_a_module_that_no_adapter_changes_is_not_looked_at(kernels: NativeKernels) -> None:
    _, laid_out = both(kernels, torch.float32)
    lora = CalledLora(Pool(kernels, 1), torch.float32, OWN_ENTRIES, laid_out)
    x, y = torch.randn(32, IN), torch.randn(32, 5)
    lora._pool = None  # type: ignore[assignment]
    assert lora.multiply(lambda _: y, x, 1, ("down_proj",), (5,)) is y
    assert lora.multiply(lambda _: y, x, 0, ("o_proj",), (5,)) is y


def test_adapters_that_are_not_laid_out_are_left_to_torch_and_never_mixed(kernels: NativeKernels) -> None:
    plain, laid_out = both(kernels, torch.float32)
    backend = CalledBackend(Pool(kernels, 1), torch.float32, entries=OWN_ENTRIES)
    assert type(backend.lora(plain)) is LoraBatch
    assert backend.lora(()) is None
    with pytest.raises(EngineError, match="laid out"):
        CalledLora(Pool(kernels, 1), torch.float32, OWN_ENTRIES, [laid_out[0], plain[1]])
