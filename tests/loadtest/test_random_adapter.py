from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters.folder import read_config_bytes
from adapters.peft_format import parse_config
from adapters.tensor_file import read_tensor_file
from adapters.validate import validate
from engine.decoder.reading import read_spec
from loadtest.geometries import write_checkpoint
from loadtest.random_adapter import rank_of_size, write_adapter
from tests.loadtest.test_geometries import small

MODEL = "models/stdlib-chat"


@pytest.mark.parametrize("num_bytes", [1, 1_000_000, 8_000_000])
def test_what_is_written_fits_the_model_and_is_of_the_size_asked_for(tmp_path: Path, num_bytes: int) -> None:
    rank = rank_of_size(MODEL, num_bytes)
    write_adapter(tmp_path / "a", MODEL, rank=rank, seed=1)
    tensors = read_tensor_file("a", str(tmp_path / "a"))
    config = parse_config("a", read_config_bytes("a", str(tmp_path / "a")))
    validate("a", config, tensors.entry_by_name, read_spec(MODEL).module_shapes(), 128)
    size = (tmp_path / "a" / "adapter_model.safetensors").stat().st_size
    assert rank == 1 or abs(size - num_bytes) < 0.1 * num_bytes


def test_peft_loads_an_adapter_and_it_changes_every_layer(tmp_path: Path) -> None:
    write_checkpoint(small("smollm2-135m"), tmp_path / "base")
    write_adapter(tmp_path / "adapter", str(tmp_path / "base"), rank=3, seed=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = base(torch.tensor([[1, 2, 3]])).logits
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not torch.equal(adapted(torch.tensor([[1, 2, 3]])).logits, plain)
    ranks = {key: tuple(weight.shape) for key, weight in adapted.named_parameters() if "lora_A" in key}
    assert len(ranks) == 7 * 3
    assert {shape[0] for shape in ranks.values()} == {3}
