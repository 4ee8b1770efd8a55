"""Adapters that give single tokens rows of their own: as exact as those that bring the whole embedding.

That they generate what peft does is tested beside others, in `test_adapter_coverage` and `test_family_adapters`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from adapters.errors import AdapterError
from adapters.registry import reference
from adapters.validate import validate
from engine.build import build_engine
from engine.decoder.reading import read_spec
from kernels import native
from tests.parity.conftest import Checkpoint, emissions_of, greedy
from tests.parity.gpu_parts import Replays, config_of
from tests.parity.peft_adapters import BEYOND_PRODUCTS, TOKENS, save_beyond_products

EMBEDDING = "base_model.model.model.embed_tokens"


def save_whole(base: PreTrainedModel, path: str, folder: Path) -> str:
    """Save the adapter in `path` anew, with the whole embedding instead of some rows."""
    tensors = load_file(f"{path}/adapter_model.safetensors")
    weight = base.get_input_embeddings().weight.detach().clone()
    weight[TOKENS] = tensors.pop(f"{EMBEDDING}.token_adapter.trainable_tokens_delta")
    folder.mkdir()
    save_file(tensors | {f"{EMBEDDING}.weight": weight}, str(folder / "adapter_model.safetensors"))
    config = json.loads(Path(path, "adapter_config.json").read_text())
    config |= {"trainable_token_indices": None, "modules_to_save": ["embed_tokens"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
    ],
    ids=["layers", "embedding", "head", "saved", "rows"],
)
def test_tokens_that_were_added_by_resizing_are_the_reason(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, options: dict[str, Any]
) -> None:
    """PEFT saves both ends unasked, and the reason was that no setting names them, or that their rank does not fit."""
    family = checkpoint("llama3")
    shapes = read_spec(family.path).module_shapes()

    def resized() -> PreTrainedModel:
        model = deepcopy(family.model)
        # PEFT compares the vocabulary with that of the base model's folder.
        model.name_or_path = family.path
        model.resize_token_embeddings(shapes["lm_head"][1] + 8)
        return model

    path = save_beyond_products(resized, tmp_path, {"a": {"r": 4, **options}})["a"]
    with pytest.raises(AdapterError, match="; tokens that were added for the adapter are not supported"):
        reference("a", path, partial(validate, shapes=shapes, max_rank=64))


@pytest.mark.parametrize("by", ["kernels", "operators", "gpu"])
def test_embeddings_are_the_adapters_rows_to_the_last_bit(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """In bfloat16, in which the sum of an old row and a rounded difference would often be its neighbor."""
    if by == "gpu":
        Replays(monkeypatch)
    elif by == "operators":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    else:
        assert native.load() is not None
    family = checkpoint("llama3")
    configs = {"tokens": BEYOND_PRODUCTS["tokens"]}
    rows = save_beyond_products(lambda: deepcopy(family.model), tmp_path, configs)["tokens"]
    whole = save_whole(family.model, rows, tmp_path / "whole")
    adapters = [reference("rows", rows), reference("whole", whole)]
    prompt = (7, *TOKENS, 8, *TOKENS[::-1])
    asked = [greedy(adapter.name, prompt, 3, adapter=adapter.digest) for adapter in adapters]
    asked = [replace(one, params=replace(one.params, num_logprobs=1 << 20)) for one in asked]
    config = config_of(family.path, "cuda" if by == "gpu" else "cpu")
    config = replace(config, dtype="bfloat16", max_num_seqs=1)
    engine = build_engine(config, adapters)
    # One after the other, so that all sums are taken in one order.
    found = [[emission.logprobs for emission in emissions_of(engine, [one])[one.request_id]] for one in asked]
    assert found[0] == found[1]
