"""A simulated GPU, for a build of torch without CUDA: what `torch.device("cuda")` is, and what `torch.cuda` does.

Numbers are computed in the host's memory, by torch and by Triton's interpreter. The rest is as on a GPU: what lies
where, what must be waited for, what a recording repeats. See `tests.simulated_gpu.order` for what counts as a fault.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulated_gpu.launches import watch_launches
from tests.simulated_gpu.operators import called
from tests.simulated_gpu.services import replace_services
from tests.simulated_gpu.tensors import Gpu, SimulatedTensor, poison


class _Here:
    """The GPU on which memory is allocated."""

    gpu: Gpu


_watched: list[Gpu] = []


@contextmanager
def in_order() -> Iterator[None]:
    """Check in the end that no device that was simulated meanwhile is at fault."""
    _watched.clear()
    yield
    assert [fault for gpu in _watched for fault in gpu.order.faults] == []


def simulate(patch: pytest.MonkeyPatch) -> Gpu:
    """Let `torch.device("cuda")` be a simulated GPU, with nothing in it."""
    _load_guard()
    _implement_allocation()
    gpu = Gpu()
    patch.setattr(_Here, "gpu", gpu, raising=False)
    _watched.append(gpu)
    replace_services(gpu, patch)
    watch_launches(gpu, patch)
    return gpu


@cache
def _load_guard() -> None:
    compiler = os.environ.get("CXX", "").split() or [shutil.which("g++") or shutil.which("clang++") or ""]
    if not compiler[0]:
        pytest.skip("no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    include, libraries = torch_folder / "include", torch_folder / "lib"
    flags = ["-shared", "-fPIC", "-std=c++20", f"-I{include}", f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "device_guard.so"
        source = Path(__file__).with_name("device_guard.cpp")
        subprocess.run([*compiler, str(source), "-o", str(made), *flags], check=True)
        ctypes.CDLL(str(made))


@cache
def _implement_allocation() -> torch.library.Library:
    """Tell torch how to allocate memory of the device, for good: this cannot be taken back."""
    library = torch.library.Library("aten", "IMPL", "CUDA")

    def allocated(elem: torch.Tensor) -> torch.Tensor:
        poison(elem, is_recorded=_Here.gpu.recording is not None)
        return SimulatedTensor.allocated(_Here.gpu, elem)

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return allocated(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return allocated(torch.empty_strided(size, stride, dtype=dtype))

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        # Where torch makes a tensor of Python's numbers, it skips what would dispatch to the class.
        return called(torch.ops.aten.copy_.default, (target, source, non_blocking), {})

    def arange(*limits: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        # Otherwise a tensor of no elements would grow.
        numbers = torch.arange(*limits, dtype=dtype)
        return torch.empty(numbers.shape, dtype=numbers.dtype, device="cuda").copy_(
            SimulatedTensor.allocated(_Here.gpu, numbers)
        )

    for name, function in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("copy_", copy)):
        library.impl(name, function)
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange)
    return library
