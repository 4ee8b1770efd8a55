from __future__ import annotations

from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.hardware import probe


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("init", "target", "words"),
    [
        (
            RuntimeError("The NVIDIA driver on your system is too old.\nPlease update"),
            None,
            "no GPU: The NVIDIA driver",
        ),
        (None, RuntimeError("Failed to find C compiler. Please specify"), "no GPU: Failed to find C compiler"),
        (None, CalledProcessError(1, ["gcc"]), "Python.h"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, init: Exception | None, target: Exception | None, words: str
) -> None:
    """With why: of a driver, a build of torch and what is visible, only whoever tried to begin knows."""

    def begin(error: Exception | None) -> None:
        if error is not None:
            raise error

    with pytest.raises(ConfigError, match="device"):
        probe(EngineConfig(model_path="", device="cuda"))
    driver = pytest.importorskip("triton.runtime").driver
    monkeypatch.setattr(torch.cuda, "init", lambda: begin(init))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: begin(target)))
    with pytest.raises(ConfigError, match="device: 'cuda'") as refused:
        probe(EngineConfig(model_path="", device="cuda"))
    assert words in str(refused.value)


def test_the_machine_is_looked_at() -> None:
    hardware = probe(EngineConfig(model_path=""))
    assert hardware.device == "cpu"
    assert hardware.num_cores >= 1
    assert hardware.free_bytes > 1 << 20
    assert Path("/proc/meminfo").exists() or hardware.free_bytes
