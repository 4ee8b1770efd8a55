"""Engines of the GPU's parts, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine import build
from engine.config import EngineConfig
from engine.decoder.model_spec import ModelSpec
from engine.gpu.build import gpu_parts
from engine.loading.checkpoint import WeightSource
from engine.parts import Parts
from engine.resolve import Hardware
from kernels.architecture import pretending
from kernels.experts import launch as experts_launch
from kernels.lora_experts import launch as lora_experts_launch
from kernels.lora_shrink import launch as shrink_launch
from kernels.streamed_linear import launch as streamed_launch
from tests.engine.gpu.host_runtime import HostRuntime

HAS_GPU = torch.cuda.is_available()


class Replays:
    """Engines of the GPU's parts: on a GPU where there is one, else on a stand-in that counts its replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runtime = HostRuntime()
        if not HAS_GPU:
            monkeypatch.setattr(build, "_cpu_parts", partial(gpu_parts, runtime=self._runtime))
            # The interpreter runs programs one after the other.
            for launch in (shrink_launch, lora_experts_launch):
                monkeypatch.setattr(launch, "PROGRAMS_WANTED", 8)
            monkeypatch.setattr(experts_launch, "ROW_OUTPUTS", 32)

    @property
    def are_there(self) -> bool:
        """Whether recorded steps were used, as far as one can tell."""
        return HAS_GPU or self._runtime.num_replays > 0


@contextmanager
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines be built as on a GPU with 8-bit floats, on the GPU that is here or a stand-in."""
    if HAS_GPU:
        yield
        return
    monkeypatch.setattr(build, "_cpu_parts", _parts_of_a_gpu)
    monkeypatch.setattr(shrink_launch, "PROGRAMS_WANTED", 8)
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 8)
    with pretending("sm_90"):
        yield


def config_of(path: str, device: str = "cuda" if HAS_GPU else "cpu") -> EngineConfig:
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


def _parts_of_a_gpu(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource) -> Parts:
    """Build what a GPU with 8-bit floats has, for a sampler and adapters on the CPU."""
    parts = gpu_parts(config, spec, replace(hardware, device="cuda", has_fp8=True), weights, HostRuntime())
    return replace(parts, config=replace(parts.config, device="cpu"))
