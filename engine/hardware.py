"""Probe the machine that an engine is to run on."""

from __future__ import annotations

from subprocess import CalledProcessError

import torch

from engine import machine
from engine.config import EngineConfig
from engine.cpu.linear import has_fast_bfloat16
from engine.errors import ConfigError
from engine.resolve import Hardware
from kernels import architecture

DTYPE_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def probe(config: EngineConfig) -> Hardware:
    """Probe the machine.

    Raises:
        ConfigError: the requested device is not available.
    """
    if config.device == "cuda":
        return _probe_gpu(config.gpu_memory_fraction)
    free_bytes = machine.available_bytes()
    return Hardware(
        device="cpu",
        num_cores=machine.num_cores(),
        free_bytes=free_bytes,
        host_bytes=free_bytes,
        has_fast_bfloat16=has_fast_bfloat16(),
    )


def _probe_gpu(fraction: float) -> Hardware:
    try:
        torch.cuda.init()
        # Triton is imported only where there is a GPU.
        from triton.runtime import driver

        driver.active.get_current_target()
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        # An old driver, a CPU build of torch, no visible GPU: the library's message says which.
        why = str(error).partition("\n")[0]
        raise ConfigError(f"device: 'cuda', but this process can use no GPU: {why}") from error
    except CalledProcessError as error:
        # Triton compiles its kernel launchers; the compiler has already printed what is missing.
        raise ConfigError("device: 'cuda' needs a C compiler and Python's headers (Python.h), for Triton.") from error
    # Memory that this process has freed, for instance of a previous engine, counts as free.
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    # Memory held by other processes counts against the fraction, which is of the whole.
    return Hardware(
        device="cuda",
        num_cores=machine.num_cores(),
        free_bytes=int(total_bytes * fraction) - (total_bytes - free_bytes),
        host_bytes=machine.available_bytes(),
        has_fast_bfloat16=torch.cuda.is_bf16_supported(),
        has_fp8=architecture.fp8_dtype() is not None,
        has_fp8_products=architecture.has_fp8_products(),
    )
