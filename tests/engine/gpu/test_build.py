"""What a start makes of the device's memory, and says of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapters.weights import RawAdapter
from engine import resolve
from engine.backend import Backend
from engine.config import EngineConfig
from engine.decoder.decoder import DecoderBatch
from engine.decoder.reading import read_spec
from engine.errors import ConfigError
from engine.gpu import build, trial
from engine.gpu.backend import TritonBackend
from engine.gpu.build import gpu_parts
from engine.gpu.model import GpuModel
from engine.gpu.rehearsal import Rehearsal
from engine.gpu.runtime import CudaRuntime
from engine.gpu.trial import ONE_STREAM, SWITCHES, settle
from engine.resolve import Hardware
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.engine import random_weights
from tests.engine.gpu.handmade_adapters import raw
from tests.kernels.gpu.conftest import DEVICE
from tests.parity.gpu_parts import Replays

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 70,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
HARDWARE = Hardware(device="cpu", num_cores=1, free_bytes=16 << 30, host_bytes=16 << 30, has_fast_bfloat16=False)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what is pretended here is true there")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    Replays(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_BY_NAME["llama-3.1-8b"] | TINY))
    return EngineConfig(
        model_path=str(tmp_path), max_model_len=8, max_num_seqs=2, max_batched_tokens=4, max_adapter_rank=16
    )


def test_a_start_says_how_far_it_has_come(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    """A large model takes minutes, in which nobody should have to guess whether it hangs."""
    caplog.set_level(logging.INFO)
    gpu_parts(config, read_spec(config.model_path), HARDWARE, random_weights, CudaRuntime(DEVICE))
    bars = [message for message in caplog.messages if "[#" in message]
    assert [bar.partition(" [")[0] for bar in bars] == ["loading weights", "recording decode steps"]
    assert "] 2 of 2, " in bars[-1]


@pytest.mark.parametrize("happens", [{"one-stream"}, None])
def test_a_driver_that_does_not_record_everything_still_serves(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, happens: set[str] | None
) -> None:
    """What it does not record is a second stream, or anything."""
    for switch in SWITCHES:
        monkeypatch.setattr(switch.module, switch.attribute, True)

    @contextmanager
    def beside(_: CudaRuntime) -> Iterator[Callable[[], None]]:
        if torch.cuda.is_current_stream_capturing() and not (happens and ONE_STREAM.is_off):
            raise RuntimeError("operation not permitted when stream is capturing")
        yield lambda: None

    monkeypatch.setattr(CudaRuntime, "beside", beside)
    monkeypatch.setattr(build, "settle", settle)
    parts = gpu_parts(config, read_spec(config.model_path), HARDWARE, random_weights, CudaRuntime(DEVICE))
    assert {switch.name for switch in SWITCHES if switch.is_off} == (happens or {switch.name for switch in SWITCHES})
    assert isinstance(parts.model, GpuModel)
    assert bool(parts.model._recorded) == bool(happens)


@pytest.mark.parametrize(("state_bytes", "expected"), [(0, 7), (4, 0)])
def test_steps_are_tried_far_into_a_context_unless_their_states_would_go_on(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, state_bytes: int, expected: int
) -> None:
    """Steps of 1 and 2 rows, without adapters and with, at the last position of a context of 8."""
    positions: list[int] = []
    make = Rehearsal._decode_batch

    def noted(self: Rehearsal, count: int, position: int, null_block: int) -> DecoderBatch:
        positions.append(position)
        return make(self, count, position, null_block)

    monkeypatch.setattr(Rehearsal, "_decode_batch", noted)
    monkeypatch.setattr(trial, "NUM_REPLAYS", 1)
    monkeypatch.setattr(build, "settle", settle)
    spec = read_spec(config.model_path)
    monkeypatch.setattr(type(spec), "state_bytes", lambda *_: state_bytes)
    parts = gpu_parts(config, spec, HARDWARE, random_weights, CudaRuntime(DEVICE))
    assert {*positions} == {expected}
    assert isinstance(parts.model, GpuModel)
    assert parts.model._recorded


def test_recordings_that_take_more_than_was_left_for_them_are_told(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = read_spec(config.model_path)
    gpu_parts(config, spec, HARDWARE, random_weights, CudaRuntime(DEVICE))
    # Steps of 1 and 2 rows, each for three reaches, a MiB each.
    assert "they take 0.01 GiB" in caplog.text
    assert "gpu_memory_fraction" not in caplog.text
    monkeypatch.setattr(build, "RESERVED_BYTES", 1 << 20)
    gpu_parts(config, spec, HARDWARE, random_weights, CudaRuntime(DEVICE))
    assert "gpu_memory_fraction" in caplog.text


@pytest.mark.parametrize(("share", "is_lent"), [(0.5, True), (0.25, False)])
def test_adapters_are_laid_out_in_pages_where_some_can_be_lent(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, share: float, is_lent: bool
) -> None:
    """Of two blocks one is left for a request, and a quarter of them is none."""
    monkeypatch.setattr(resolve, "LENT_PAGE_BYTES", 1024)
    spec, gpu = read_spec(config.model_path), replace(HARDWARE, device="cuda")
    # Without it the cache has no more blocks than rows use.
    few = replace(config, max_lent_cache_share=share, enable_prefix_cache=False)
    parts = gpu_parts(few, spec, gpu, random_weights, CudaRuntime(DEVICE))
    assert (parts.config.lent_run_blocks, parts.config.max_lent_blocks) == (1, int(is_lent))
    laid_out = parts.lay_out(RawAdapter(projections={(0, "q_proj"): raw(2, 32, 32)}, dtype=torch.float32))
    assert (laid_out.num_pages > 0) == is_lent


FULL = torch.OutOfMemoryError("full")


@pytest.mark.parametrize(
    ("place", "changes", "told"),
    [
        ("_load", {}, r"the weights of .*: raise gpu_memory_fraction \(0.9\), or quantize them \(quantization\)\."),
        ("measure", {}, r"a full step: lower max_batched_tokens \(4\), or raise gpu_memory_fraction \(0.9\)\."),
        ("_cache", {}, r"the cache: lower gpu_memory_fraction \(0.9\)\."),
        ("_cache", {"kv_cache_bytes": 1_000_000}, r"the cache: lower kv_cache_bytes \(1000000\)\."),
        ("GpuModel", {}, r"recorded steps: lower max_num_seqs \(2\), or raise gpu_memory_fraction \(0.9\)\."),
    ],
)
def test_memory_that_does_not_do_names_the_number_to_change(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, place: str, changes: dict[str, int], told: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr(build, place, full)
    with pytest.raises(ConfigError, match=f"not enough GPU memory for {told}"):
        gpu_parts(
            replace(config, **changes),  # type: ignore[arg-type]
            read_spec(config.model_path),
            HARDWARE,
            random_weights,
            CudaRuntime(DEVICE),
        )


def test_only_a_gated_sum_and_rescaling_are_left_to_torch() -> None:
    """What a backend does not override is computed by torch's operators, which no type checker remarks on."""
    inherited = {name for name in vars(Backend) if not name.startswith("_")} - vars(TritonBackend).keys()
    assert inherited == {"add_gated", "rescale"}
