"""Engines on a GPU, or on a simulated one where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine import build
from engine.config import EngineConfig
from engine.gpu import backend, runtime
from engine.gpu import build as gpu_build
from engine.gpu.rehearsal import Rehearsal
from engine.gpu.streamed_linear import StreamedLinear, Way
from engine.gpu.trial import SWITCHES, Step
from engine.resolve import Hardware
from kernels import architecture, overlap, triton_cache
from kernels.architecture import pretending
from kernels.experts import launch as experts_launch
from kernels.lora_experts import launch as lora_experts_launch
from kernels.lora_shrink import launch as shrink_launch
from kernels.rope_attention import launch as rope_launch
from kernels.rope_kv_write import launch as rope_kv_launch
from kernels.streamed_linear import launch as streamed_launch
from tests.simulated_gpu.device import simulate
from tests.simulated_gpu.tensors import Gpu

HAS_GPU = torch.cuda.is_available()
HARDWARE = Hardware(
    device="cuda",
    num_cores=1,
    free_bytes=1 << 30,
    host_bytes=1 << 30,
    has_fast_bfloat16=True,
    has_fp8=False,
    has_fp8_products=False,
)


STEPPING = "engine/engine.py"


class Replays:
    """Engines on a GPU where there is one, else on a simulated one that counts its replays.

    Args:
        hardware, target: what the simulated one has, and which it is (`kernels.architecture`).
        computes_all: whether each recording is computed when it is made, as on a GPU, also one that no step replays.

    Attributes:
        gpu: the simulated one.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        hardware: Hardware = HARDWARE,
        target: str = "sm_90",
        *,
        computes_all: bool = False,
    ) -> None:
        self.gpu: Gpu | None = None
        if HAS_GPU:
            return
        self.gpu = simulate(monkeypatch)
        self.gpu.computes_first_replays = computes_all
        monkeypatch.setattr(build, "probe", lambda config: hardware if config.device == "cuda" else _PROBE(config))
        # Kernels may begin before those before them have ended. Simulated, they do not, but must wait as if they did.
        monkeypatch.setattr(overlap, "CAN_WAIT", True)
        monkeypatch.setattr(architecture, "_present", lambda: target)
        # The interpreter compiles nothing, and measures nothing: what it runs it runs one after the other.
        monkeypatch.setattr(triton_cache, "compile_ahead", lambda *_: None)
        monkeypatch.setattr(runtime, "NUM_WARM_UPS", 0)
        monkeypatch.setattr(runtime.CudaRuntime, "seconds", lambda *_: 0.0)
        monkeypatch.setattr(Rehearsal, "run", lambda _: None)
        monkeypatch.setattr(gpu_build, "settle", _try_one)
        for launch in (shrink_launch, lora_experts_launch):
            monkeypatch.setattr(launch, "PROGRAMS_WANTED", 8)
        monkeypatch.setattr(rope_kv_launch, "BLOCK_HEADS_OF_FEW", rope_kv_launch.BLOCK_HEADS)
        monkeypatch.setattr(experts_launch, "ROW_OUTPUTS", 32)

    @property
    def are_there(self) -> bool:
        """Whether recorded steps were used, as far as one can tell, and nothing given up at start."""
        if self.gpu is None:
            return not any(switch.is_off for switch in SWITCHES)
        # Each recording is replayed once when it is made.
        return self.gpu.num_replays > self.gpu.num_recordings

    @property
    def waits(self) -> list[str]:
        """Where the engine's thread has waited in a step for the simulated device, other than for tokens."""
        return [] if self.gpu is None else [wait for wait in self.gpu.order.waits if STEPPING in wait]


_PROBE = build.probe


def _try_one(steps: Callable[[], Iterable[Step]], gpu: runtime.CudaRuntime) -> bool:
    """Stand for `engine.gpu.trial.settle`, which takes as long as a test."""
    try:
        gpu.record(next(iter(steps())))
    except RuntimeError:
        return False
    return True


@contextmanager
def an_fp8_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines be built as on a GPU with 8-bit floats, on the GPU that is here or a simulated one."""
    if HAS_GPU:
        yield
        return
    Replays(monkeypatch, replace(HARDWARE, has_fp8=True))
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 8)
    with pretending("sm_90"):
        yield


def join_few_rows(monkeypatch: pytest.MonkeyPatch, others: Way) -> None:
    """Let a row or two take the kernels that do more at once, and products of more rows go another way."""

    def take(linears: Sequence[StreamedLinear], _: object) -> None:
        for linear in linears:
            linear.ways = tuple(Way.ROWS if rows <= 2 else others for rows in linear.rows)
            linear.normed_rows = (1, 2)

    monkeypatch.setattr(gpu_build, "measure", take)
    if not HAS_GPU:
        # The interpreter runs programs one after the other.
        cut = streamed_launch.RowCut(block_n=32, block_k=64, num_warps=1)
        monkeypatch.setattr(streamed_launch, "usual_row_cut", lambda *_, **__: cut)
        few = replace(rope_launch.USUAL, num_splits=2)
        monkeypatch.setattr(backend, "rope_attention", partial(rope_launch.rope_attention, cut=few))


def config_of(path: str, device: str = "cuda") -> EngineConfig:
    return EngineConfig(
        model_path=path,
        device=device,
        dtype="float32",
        num_threads=1,
        kv_cache_bytes=1 << 22,
        max_num_seqs=4,
        max_batched_tokens=16,
        max_adapter_rank=16,
    )
