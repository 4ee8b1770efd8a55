"""Memory that weights are said to take on a CPU, before they are read, against what they then take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, StableLmConfig, StableLmForCausalLM

from engine.config import EngineConfig
from engine.cpu import called_backend, native_backend
from engine.cpu.build import build_model, start_threads
from engine.cpu.held import held_bytes
from engine.cpu.panels import Panels
from engine.hardware import probe
from engine.loading.spec import read_checkpoint_spec
from engine.resolve import resolve
from tests.engine import int4_checkpoints, mxfp4_checkpoints
from tests.parity.conftest import make_model

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def write(folder: Path, kind: str) -> None:
    """Write a checkpoint whose matrices are wide enough for groups, and so large that the rest hardly counts."""
    if kind == "fallback":
        StableLmForCausalLM(StableLmConfig(**WIDE)).save_pretrained(folder)
    elif kind == "experts":
        make_model("qwen3-moe", hidden_size=128, moe_intermediate_size=128).save_pretrained(folder)
    elif kind == "mxfp4":
        make_model("gpt-oss", hidden_size=128, intermediate_size=128).save_pretrained(folder)
        tensors, _ = mxfp4_checkpoints.quantize_experts(load_file(folder / "model.safetensors"))
        change(folder, tensors, mxfp4_checkpoints.CONFIG)
    else:
        LlamaForCausalLM(LlamaConfig(**WIDE, tie_word_embeddings=kind == "tied")).save_pretrained(folder)
        if kind == "awq":
            tensors, _ = int4_checkpoints.quantize_layers(load_file(folder / "model.safetensors"), "awq")
            change(folder, tensors, int4_checkpoints.config_of("awq"))


def change(folder: Path, tensors: dict[str, Any], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of all panels that will be laid out."""
    sizes: list[int] = []

    def count(lay_out: Callable[..., Panels]) -> Callable[..., Panels]:
        def wrapped(*arguments: Any) -> Panels:
            panels = lay_out(*arguments)
            sizes.append(sum(tensor.nbytes for tensor in panels.tensors))
            return panels

        return wrapped

    places = ((called_backend, "lay_out"), (called_backend, "lay_out_vocabulary"), (native_backend, "lay_out"))
    for module, name in places:
        monkeypatch.setattr(module, name, count(getattr(module, name)))
    return sizes


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "awq", "mxfp4", "fallback"])
def test_weights_take_what_was_said_before_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str | None
) -> None:
    write(tmp_path, kind)
    options = EngineConfig(
        model_path=str(tmp_path), dtype="float32", quantization=quantization, num_threads=1, kv_cache_bytes=1 << 24
    )
    spec = read_checkpoint_spec(options.model_path)
    config = resolve(options, spec, probe(options))
    sizes = counted(monkeypatch)
    threads = start_threads(spec, config)
    assert threads is not None
    build_model(spec, config, threads)
    found = sum(sizes)
    if kind == "fallback":
        found += spec.vocab_size * spec.hidden_size * 4  # the embedding, which stays as it is
    said = held_bytes(spec, config, in_panels=True)
    assert said == pytest.approx(found, rel=0.03)
    assert held_bytes(spec, config, in_panels=False) >= said
