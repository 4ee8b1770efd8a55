"""Shares of a CPU's memory are taken of what the weights leave."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ResolvedConfig
from engine.costs import num_weights
from engine.cpu import build
from engine.decoder.model_spec import ModelSpec
from engine.decoder.reading import read_spec
from engine.errors import ConfigError
from engine.loading.checkpoint import load_parameters
from engine.resolve import Hardware, resolve
from tests.engine.checkpoint_folder import write_config

GIB = 1 << 30
LARGE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""Eight billion weights: 15 GiB in bfloat16, and one GiB of cache for a request of full length."""
SMALL = LARGE | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
WEIGHTS_BYTES = 16_060_000_000
CACHE_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2


class _ReadError(Exception):
    """Raised in place of reading weights."""


def machine(free_bytes: int) -> Hardware:
    return Hardware(device="cpu", num_cores=1, free_bytes=free_bytes, host_bytes=free_bytes, has_fast_bfloat16=True)


def large(folder: Path, **options: Any) -> EngineConfig:
    folder.mkdir(exist_ok=True)
    return EngineConfig(model_path=write_config(folder, **LARGE), **options)


def resolved(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig, free_bytes: int
) -> tuple[ResolvedConfig, ModelSpec]:
    """Return what the model is built with."""
    built: list[tuple[ResolvedConfig, ModelSpec]] = []

    def stop(spec: ModelSpec, config: ResolvedConfig, *_: object) -> None:
        built.append((config, spec))
        raise _ReadError

    monkeypatch.setattr(build, "build_model", stop)
    monkeypatch.setattr(build, "start_threads", lambda *_: None)
    with pytest.raises(_ReadError):
        build.cpu_parts(config, read_spec(config.model_path), machine(free_bytes), load_parameters)
    return built[0]


@pytest.mark.parametrize("free_bytes", [18 * GIB, 24 * GIB, 64 * GIB])
def test_weights_caches_and_adapters_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    """Shares were of what was free before the weights were read: hours later the kernel killed the process."""
    found, _ = resolved(monkeypatch, large(tmp_path), free_bytes)
    cache_bytes = found.num_blocks * 16 * CACHE_BYTES_PER_TOKEN
    left = free_bytes - WEIGHTS_BYTES
    assert found.max_host_adapter_bytes == pytest.approx(left / 4, rel=0.01)
    assert cache_bytes + found.max_host_adapter_bytes < left
    # One request of full length fits, if need be in more than the usual share.
    assert found.num_blocks * 16 >= 8192
    assert cache_bytes == pytest.approx(max(left / 5, GIB), rel=0.01)


def test_quantized_weights_leave_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit where those of 16 bits do not."""
    monkeypatch.setattr(build, "_kernels", lambda *_: object())
    found, _ = resolved(monkeypatch, large(tmp_path, quantization="int4"), 12 * GIB)
    assert found.max_host_adapter_bytes > GIB
    with pytest.raises(ConfigError, match=r"take 1606\d{7} bytes of memory; 12884901888 bytes are free\. Set q"):
        resolved(monkeypatch, large(tmp_path), 12 * GIB)


def test_a_draft_model_s_weights_are_left_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    small = write_config(tmp_path / "small", **SMALL)
    monkeypatch.setattr(build, "read_checkpoint_spec", read_spec)
    config, free_bytes = large(tmp_path / "large", draft_model=small), 24 * GIB
    found, _ = resolved(monkeypatch, config, free_bytes)
    small_bytes = 2 * num_weights(read_spec(small))
    left = free_bytes - WEIGHTS_BYTES - small_bytes
    assert small_bytes > GIB
    assert found.max_host_adapter_bytes == pytest.approx(left / 4, rel=0.01)
    with pytest.raises(ConfigError, match=f"those of draft_model '{small}' {small_bytes} bytes; "):
        resolved(monkeypatch, config, 16 * GIB)


def test_what_was_set_stays_and_is_warned_of_if_it_may_grow_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = large(tmp_path, kv_cache_bytes=30 * GIB, max_host_adapter_bytes=GIB)
    found, spec = resolved(monkeypatch, config, 24 * GIB)
    assert (found.num_blocks * 16 * CACHE_BYTES_PER_TOKEN, found.max_host_adapter_bytes) == (30 * GIB, GIB)
    with caplog.at_level(logging.WARNING):
        build.warn_if_too_much(spec, found, 30 * GIB, machine(31 * GIB))
        assert not caplog.records
        build.warn_if_too_much(spec, found, 30 * GIB, machine(31 * GIB - 1))
    assert f"take {31 * GIB} bytes of memory; {31 * GIB - 1} are free beside the weights" in caplog.text


def test_a_request_that_does_not_fit_beside_the_weights_is_told_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_bytes: .* bytes are needed\. \d+ bytes of memory are free beside"):
        resolved(monkeypatch, large(tmp_path), 16 * GIB)


def test_a_geometry_that_our_kernels_do_not_take_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing said why the model was slow."""
    options = EngineConfig(model_path=write_config(tmp_path, **SMALL), block_tokens=24)
    spec, config = read_spec(options.model_path), resolve(options, read_spec(options.model_path), machine(64 * GIB))
    assert build.start_threads(spec, config) is None
    assert "computed by torch, which is slower: our kernels need a head width and block_tokens" in caplog.text
