from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, ResolvedConfig
from engine.cpu import build
from engine.decoder.model_spec import ModelSpec
from engine.loading.checkpoint import load_parameters
from engine.loading.spec import read_model_spec
from engine.resolve import Hardware
from kernels.native import NativeKernels
from tests.engine.checkpoint_folder import write_config

ROOMY = 1 << 36
LLAMA: dict[str, Any] = {"head_dim": 16}
WITH_SMALL_HEADS: dict[str, Any] = {"head_dim": 8}
"""Our kernels do not take them."""
COMPUTED_BY_TRANSFORMERS = LLAMA | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}


class _ReadError(Exception):
    """Raised in place of reading weights."""


@pytest.mark.parametrize(
    ("capability", "has_kernels", "has_instructions", "model", "expected"),
    [
        ("AVX2", True, False, LLAMA, "bfloat16"),
        ("AVX512", True, False, LLAMA, "bfloat16"),
        ("AVX2", True, False, COMPUTED_BY_TRANSFORMERS, "bfloat16"),
        ("DEFAULT", True, False, LLAMA, "float32"),
        ("AVX2", False, False, LLAMA, "float32"),
        ("AVX2", True, False, WITH_SMALL_HEADS, "float32"),
        ("DEFAULT", False, True, WITH_SMALL_HEADS, "bfloat16"),
    ],
)
def test_bfloat16_is_the_default_where_our_kernels_widen_it_or_the_processor_multiplies_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: NativeKernels,
    capability: str,
    has_kernels: bool,
    has_instructions: bool,
    model: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(build.native, "load", lambda: kernels if has_kernels else None)
    dtypes: list[str] = []

    def stop(_: ModelSpec, config: ResolvedConfig, *_others: object) -> None:
        dtypes.append(config.dtype)
        raise _ReadError

    monkeypatch.setattr(build, "build_model", stop)
    config = EngineConfig(model_path=write_config(tmp_path, **model), num_threads=1)
    hardware = Hardware(
        device="cpu", num_cores=1, free_bytes=ROOMY, host_bytes=ROOMY, has_fast_bfloat16=has_instructions
    )
    with pytest.raises(_ReadError):
        build.cpu_parts(config, read_model_spec(config.model_path), hardware, load_parameters)
    assert dtypes == [expected]
