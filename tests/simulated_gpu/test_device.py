"""What the simulated GPU computes, and what it finds wrong."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from engine.gpu.runtime import CudaRuntime
from engine.gpu.staging import Staging
from kernels.overlap import wait
from tests.simulated_gpu.device import simulate
from tests.simulated_gpu.tensors import Gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is here is not simulated")
DEVICE = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return simulate(monkeypatch)


@triton.jit
def _double_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=0)
    tl.store(out_ptr + offsets, 2 * x, mask=offsets < count)


@triton.jit
def _add_one_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def _copy_kernel(x_ptr, out_ptr, READS_EARLY: tl.constexpr, OVERLAPS: tl.constexpr):
    if not READS_EARLY:
        wait(OVERLAPS)
    x = tl.load(x_ptr)
    if READS_EARLY:
        wait(OVERLAPS)
    tl.store(out_ptr, x)


@triton.jit
def _follow_kernel(addresses_ptr, out_ptr):
    tl.store(out_ptr, tl.load(tl.load(addresses_ptr).to(tl.pointer_type(tl.float32))))


@triton.jit
def _sum_kernel(x_ptr, parts_ptr, arrived_ptr, out_ptr, ORDER: tl.constexpr):
    one, count = tl.program_id(0), tl.num_programs(0)
    tl.store(parts_ptr + one, tl.load(x_ptr + one))
    if tl.atomic_add(arrived_ptr, 1, sem=ORDER) == count - 1:
        total = 0.0
        for other in range(count):
            total += tl.load(parts_ptr + other)
        tl.store(out_ptr, total)


def _doubled(x: torch.Tensor, count: int | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    _double_kernel[(triton.cdiv(len(x), 4),)](x, out, len(x) if count is None else count, BLOCK=4)
    return out


def test_operators_and_kernels_compute_on_it(gpu: Gpu) -> None:
    x = torch.arange(6, device=DEVICE)
    assert x.device == torch.device("cuda", 0)
    assert (x[2:] + torch.tensor(1)).tolist() == [3, 4, 5, 6]
    assert _doubled(x).tolist() == [0, 2, 4, 6, 8, 10]
    x.view(2, 3)[1] = -1
    assert x.cpu().tolist() == [0, 1, 2, -1, -1, -1]
    assert not gpu.order.faults


def test_memory_that_nobody_has_written_holds_no_number_of_use(gpu: Gpu) -> None:
    assert torch.empty(3, device=DEVICE).isnan().all()
    assert torch.empty(3, dtype=torch.int64, device=DEVICE).min() > 1 << 60
    assert gpu.order.waits, "whether all are is known to the device only"


def test_numbers_of_the_host_are_refused(gpu: Gpu) -> None:
    x, host = torch.ones(4, device=DEVICE), torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        _ = x + host
    with pytest.raises(AssertionError, match="a tensor of the host"):
        _doubled(host)


def test_kernels_stay_within_memory_that_is_there(gpu: Gpu) -> None:
    x = torch.ones(6, device=DEVICE)
    with pytest.raises(Exception, match=r"past the end|is not allocated"):
        _doubled(x, count=8)
    with pytest.raises(Exception, match="is not allocated"):
        _follow_kernel[(1,)](torch.tensor([64], device=DEVICE), x)
    pinned = torch.zeros(4, pin_memory=True)
    with pytest.raises(Exception, match="lies on the host"):
        _follow_kernel[(1,)](torch.tensor([pinned.data_ptr()], device=DEVICE), x)


def test_a_recording_repeats_what_was_enqueued_and_nothing_else(gpu: Gpu) -> None:
    runtime, x, factor = CudaRuntime(DEVICE), torch.arange(6, device=DEVICE), 3
    replay, out = runtime.record(lambda: _doubled(x)[1:] * factor + x.sum())
    x.fill_(5)
    factor = 100
    replay()
    assert out.tolist() == [60] * 5
    assert not gpu.order.faults


@pytest.mark.parametrize("looks", ["item", "mask", "nonzero", "host", "index"])
def test_what_waits_is_told(gpu: Gpu, looks: str) -> None:
    runtime, x = CudaRuntime(DEVICE), torch.ones(4, device=DEVICE)
    ways = {
        "item": lambda: x * x.sum().item(),
        "mask": lambda: x[x > 0],
        "nonzero": lambda: x.nonzero(),
        "host": lambda: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE),
        "index": lambda: x[torch.tensor([0, 2])],
    }
    assert not runtime.only_enqueues(ways[looks])
    assert runtime.only_enqueues(lambda: x + 1)


def test_a_recording_that_outlives_its_input_is_at_fault(gpu: Gpu) -> None:
    runtime, held = CudaRuntime(DEVICE), [torch.ones(4, device=DEVICE)]
    replay, _ = runtime.record(lambda: held[0] + 1)
    assert not gpu.order.faults
    held.clear()
    replay()
    assert any("was freed" in fault for fault in gpu.order.faults)


def test_streams_wait_for_each_other_or_are_at_fault(gpu: Gpu) -> None:
    side, x = torch.cuda.Stream(DEVICE), torch.zeros(4, device=DEVICE)
    with torch.cuda.stream(side):
        x.add_(1)
    assert len(gpu.order.faults) == 1
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        x.add_(1)
    assert len(gpu.order.faults) == 1
    _doubled(x)
    assert len(gpu.order.faults) == 2
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    _doubled(x)
    assert len(gpu.order.faults) == 2


def test_other_parts_of_the_same_memory_do_not_matter(gpu: Gpu) -> None:
    x = torch.zeros(4, 4, device=DEVICE)
    torch.cuda.synchronize()
    x[:, :2].add_(1)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        x[:, 2:].add_(1)
    assert not gpu.order.faults


def test_memory_is_freed_when_all_who_use_it_are_done(gpu: Gpu) -> None:
    side, kept, lost = torch.cuda.Stream(DEVICE), torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _ = kept + lost
    kept.record_stream(side)
    del kept
    assert not gpu.order.faults
    del lost
    assert len(gpu.order.faults) == 1


def test_the_host_leaves_alone_what_the_device_still_copies(gpu: Gpu) -> None:
    pinned, x = torch.zeros(4, pin_memory=True), torch.zeros(4, device=DEVICE)
    pinned[:2] = torch.ones(2)
    x.copy_(pinned, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    pinned[0] = 2
    assert len(gpu.order.faults) == 1
    event.synchronize()
    pinned[0] = 3
    pinned.copy_(x, non_blocking=True)
    assert len(gpu.order.faults) == 1
    pinned.tolist()
    assert len(gpu.order.faults) == 2
    assert not gpu.order.waits


def test_a_fetch_is_waited_for_and_staged_numbers_are_not_overwritten(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CudaRuntime(DEVICE)
    fetched = runtime.fetch(torch.arange(3, device=DEVICE))
    assert fetched().tolist() == [0, 1, 2]
    staging = Staging(4, runtime)
    for number in range(5):
        staging.send_list([number] * 4)
    assert staging.device.tolist() == [4] * 4
    assert not gpu.order.faults
    monkeypatch.setattr(runtime, "fence", lambda: lambda: None)
    for number in range(5):
        staging.send_list([number] * 4)
    assert gpu.order.faults


@pytest.mark.parametrize(("order", "is_right"), [("acq_rel", True), ("relaxed", False)])
def test_programs_of_a_launch_rely_on_each_other_through_atomics_only(gpu: Gpu, order: str, is_right: bool) -> None:
    x, parts, out = (torch.ones(3, device=DEVICE) for _ in range(3))
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _sum_kernel[(3,)](x, parts, arrived, out, ORDER=order)
    assert out[0].item() == 3
    assert bool(gpu.order.faults) != is_right


def test_programs_of_one_launch_write_apart_and_those_of_two_need_not(gpu: Gpu) -> None:
    x, out = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)
    for _ in range(2):
        _double_kernel[(2,)](x, out, 8, BLOCK=4)
        _double_kernel[(2,)](out, x, 8, BLOCK=4)
    assert not gpu.order.faults
    _add_one_kernel[(2,)](x)
    assert gpu.order.faults


@pytest.mark.parametrize("reads_early", [False, True])
def test_kernels_that_overlap_wait_before_they_read_what_those_before_write(gpu: Gpu, reads_early: bool) -> None:
    x, out = torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    options = {"READS_EARLY": reads_early, "OVERLAPS": True}
    _copy_kernel[(1,)](x, out, **options)
    assert not gpu.order.faults, "what an operator has written is there"
    _copy_kernel[(1,)](out, x, **options)
    assert bool(gpu.order.faults) == reads_early
    gpu.order.faults.clear()
    out.add_(1)
    _copy_kernel[(1,)](x, out, **options)
    assert not gpu.order.faults, "an operator waits for all before it"
