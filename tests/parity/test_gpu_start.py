"""The steps that a start tries are right for models of every kind: nothing is given up where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.build import build_engine
from engine.gpu import build as gpu_build
from engine.gpu.trial import SWITCHES, settle
from tests.parity.conftest import Checkpoint, made, saved_once
from tests.parity.gpu_parts import HAS_GPU, Replays, config_of
from tests.parity.test_states import MODELS as WITH_STATES

pytestmark = pytest.mark.skipif(HAS_GPU, reason="every start of an engine does it there")


def start(path: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Start an engine that tries steps as on a GPU; return what it has given up."""
    Replays(monkeypatch)
    monkeypatch.setattr(gpu_build, "settle", settle)
    for switch in SWITCHES:
        monkeypatch.setattr(switch.module, switch.attribute, True)
    build_engine(replace(config_of(path), max_model_len=70, max_num_seqs=2, **options))
    return [switch.name for switch in SWITCHES if switch.is_off]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        ("qwen3-moe", {}),
        ("gpt-oss", {"dtype": "bfloat16"}),
    ],
)
def test_with_windows_experts_and_an_8_bit_cache(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    assert start(checkpoint(name).path, monkeypatch, **options) == []


def test_with_states(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a step that is repeated would continue from, if it were not that of a first token."""
    saved = saved_once(lambda name: made(name, **WITH_STATES[name]), tmp_path_factory)("Lfm2ForCausalLM")
    assert start(saved.path, monkeypatch) == []
