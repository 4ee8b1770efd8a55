"""What is measured of products by 8-bit floats, on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.streamed_linear import Way
from kernels.architecture import pretending
from loadtest.gpu import kernels, sweep, timing
from loadtest.gpu.sizes import Geometry
from loadtest.gpu.timing import Ceilings

HERE = torch.device("cuda")
GEOMETRY = Geometry(name="tiny", hidden=96, inner=96, heads=3, kv_heads=1, head_dim=32)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tries what is measured on a GPU"),
    pytest.mark.usefixtures("a_gpu"),
]


@pytest.mark.parametrize(("gpu", "has_fp8"), [("sm_80", False), ("sm_90", True)])
def test_fp8_has_a_ceiling_of_its_own_where_there_are_products_of_it(
    monkeypatch: pytest.MonkeyPatch, gpu: str, has_fp8: bool
) -> None:
    seconds = iter((1.0, 1.0, 0.5))
    timer = type("Timer", (), {"seconds": lambda _self, run: [run(), next(seconds)][1]})
    for name, value in (("COPY_BYTES", 64), ("MATRIX_SIZE", 32), ("GpuTimer", lambda flush: timer())):
        monkeypatch.setattr(timing, name, value)
    with pretending(gpu):
        ceilings = timing.measure_ceilings()
    assert (ceilings.bytes_per_s, ceilings.flop_per_s) == (128, 2 * 32**3)
    assert ceilings.fp8_flop_per_s == (4 * 32**3 if has_fp8 else None)
    assert ceilings.floor_s(1.0, 2 * 32**3, 4 * 32**3) == (2.0 if has_fp8 else 3.0)


def test_every_way_is_timed_in_every_shape() -> None:
    assert not list(kernels._fp8_products(GEOMETRY, HERE, rows=2))
    with pretending("sm_90"):
        benches = list(kernels._fp8_products(GEOMETRY, HERE, rows=2))
        for one in benches:
            assert isinstance(found := one.run(), torch.Tensor)
            assert found.isfinite().all()
    assert [one.name for one in benches[:4]] == [f"fp8 product by {way.value}, 2 rows by 96 x 96" for way in Way]
    # Weights of a byte each, and inputs and outputs of two.
    assert benches[0].num_bytes == 96 * 96 + 2 * 2 * 96 * 2
    assert (benches[0].num_flop, benches[0].num_fp8_flop) == (0.0, 2 * 2 * 96 * 96)
    assert len(benches) == 3 * len(Way)


def test_other_cuts_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "FP8", ((64, 128, 4, 4),))
    times = iter(range(1000, 0, -1))
    timer = type("Timer", (), {"seconds": lambda _self, run: [run(), float(next(times))][1]})()
    assert not list(sweep._fp8_products(GEOMETRY, HERE, 17))
    with pretending("sm_90"):
        for one in sweep._fp8_products(GEOMETRY, HERE, 17):
            found = sweep.measure(one, Ceilings(bytes_per_s=1e12, flop_per_s=1e12), timer)
            assert found.name.startswith("fp8 product, 17 rows by")
            # The one above and the wide one, by 1, 2, 4 and 8 parts of the depth.
            assert len(found.us_by_cut) == 8
            assert None not in found.us_by_cut.values()
