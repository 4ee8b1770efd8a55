"""Experts that a checkpoint has in MXFP4: the tokens of a model that has the numbers which they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.identity import AdapterRef
from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from engine.decoder.reading import read_spec
from engine.gpu import experts
from kernels.experts import launch as row_launch
from kernels.mxfp4.reference import Mxfp4Matrix, pack_mxfp4
from tests.engine.mxfp4_checkpoints import CONFIG, quantize_experts
from tests.parity.conftest import greedy, make_model, random_prompts, run_engine
from tests.parity.gpu_parts import Replays, config_of
from tests.parity.peft_adapters import OF_EXPERTS, save_beyond_products


def tokens_of(folder: Path, quantization: str | None, *adapters: AdapterRef) -> dict[str, list[int]]:
    config = EngineConfig(
        model_path=str(folder), dtype="float32", quantization=quantization, kv_cache_bytes=1 << 22, num_threads=2
    )
    digests = [*(adapter.digest for adapter in adapters), None]
    requests = [
        greedy(str(n), prompt, adapter=digests[n % len(digests)])
        for n, prompt in enumerate(random_prompts(6, longest=60))
    ]
    return run_engine(build_engine(config, adapters), requests)


def save_both(folder: Path) -> None:
    """Write a checkpoint, and beside it one that has the numbers which its experts stand for."""
    for name in ("stored", "meant"):
        make_model("gpt-oss").save_pretrained(folder / name)
    stored, meant = quantize_experts(load_file(folder / "meant" / "model.safetensors"))
    save_file(meant, folder / "meant" / "model.safetensors")
    save_file(stored, folder / "stored" / "model.safetensors")
    config = json.loads((folder / "stored" / "config.json").read_text())
    (folder / "stored" / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


@pytest.mark.parametrize(("by", "quantization"), [("kernels", None), ("kernels", "int8"), ("operators", None)])
def test_tokens_are_those_of_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, quantization: str | None
) -> None:
    if by == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    save_both(tmp_path)
    expected = tokens_of(tmp_path / "meant", quantization)
    assert tokens_of(tmp_path / "stored", quantization) == expected


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_adapters_of_experts_are_added_to_them_as_to_numbers(tmp_path: Path, quantization: str | None) -> None:
    save_both(tmp_path)
    path_by_name = save_beyond_products(lambda: make_model("gpt-oss"), tmp_path / "adapters", OF_EXPERTS)
    adapters = [reference(name, path_by_name[name]) for name in ("all-experts", "patterned-experts")]
    found = tokens_of(tmp_path / "stored", quantization, *adapters)
    assert found == tokens_of(tmp_path / "meant", quantization, *adapters)
    assert found != tokens_of(tmp_path / "stored", quantization)


def test_a_gpu_gives_the_tokens_of_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, crowds of decodes and rows alone, by recorded steps too; in Triton's interpreter elsewhere.

    One of the requests has an adapter of experts.
    """
    save_both(tmp_path)
    only = {"all-experts": OF_EXPERTS["all-experts"]}
    paths = save_beyond_products(lambda: make_model("gpt-oss"), tmp_path / "adapters", only)
    adapter = reference("all-experts", paths["all-experts"])
    requests = [
        greedy(str(n), prompt, 2 + n, adapter=None if n else adapter.digest)
        for n, prompt in enumerate(random_prompts(3, longest=9))
    ]
    options = {"max_num_seqs": 3, "max_batched_tokens": 4, "max_model_len": 16}
    expected = run_engine(
        build_engine(replace(config_of(str(tmp_path / "meant"), "cpu"), **options), [adapter]), requests
    )
    laid: list[Mxfp4Matrix] = []

    def noting(*weight: Any) -> Mxfp4Matrix:
        laid.append(pack_mxfp4(*weight))
        return laid[-1]

    monkeypatch.setattr(experts, "pack_mxfp4", noting)
    replays = Replays(monkeypatch)
    if not torch.cuda.is_available():
        # The interpreter runs programs one after the other.
        monkeypatch.setattr(row_launch, "GATE_UP_OUTPUTS", 32)
        monkeypatch.setattr(row_launch, "DOWN_OUTPUTS", 128)
    engine = build_engine(replace(config_of(str(tmp_path / "stored")), **options), [adapter])
    assert run_engine(engine, requests) == expected
    assert replays.are_there
    assert len(laid) == 2 * read_spec(str(tmp_path / "stored")).num_layers
