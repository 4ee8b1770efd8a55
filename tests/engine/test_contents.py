from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from engine.loading.checkpoint import load_parameters
from engine.loading.contents import PIECE_BYTES, check_contents, opened
from engine.loading.spec import read_checkpoint_spec
from engine.loading.weight_files import SINGLE
from tests.architecture.source_tree import ROOT
from tests.engine.checkpoint_folder import write_checkpoint
from tests.engine.test_int4 import Q, write

CPU = torch.device("cpu")


def refusals(folder: Path) -> set[str]:
    """Return what a look at the files says, and what their load says."""
    spec = read_spec(str(folder))
    found = set()
    for look in (lambda: check_contents(str(folder), spec), lambda: list(load(folder))):
        with pytest.raises(CheckpointError) as caught:
            look()
        found.add(str(caught.value))
    return found


def load(folder: Path) -> dict[str, torch.Tensor]:
    path = str(folder)
    return {
        name: weight
        for name, weight in load_parameters(path, read_spec(path), torch.float32, CPU)
        if isinstance(weight, torch.Tensor)
    }


@pytest.mark.parametrize("damage", ["missing", "left over", "shape", "type"])
def test_a_look_at_the_files_says_what_their_load_would(damage: str, tmp_path: Path) -> None:
    """A configuration was told to be good, and its server ended a minute later."""
    tensors = write_checkpoint(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "left over":
        tensors[name.replace("q_proj", "r_proj")] = torch.ones(2)
    else:
        tensors[name] = torch.ones(3) if damage == "shape" else tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / SINGLE)
    (told,) = refusals(tmp_path)
    assert "layers.1.self_attn." in told


def test_no_torch_is_needed(tmp_path: Path) -> None:
    """Who checks a configuration waits for nothing else."""
    groups = torch.arange(128, dtype=torch.int32) // 128
    write(tmp_path, "gptq", 128, {f"{Q}.g_idx": groups, f"{Q}.bias": torch.zeros(128, dtype=torch.bfloat16)})
    program = (
        "import sys; from engine.decoder.reading import read_spec; from engine.loading.contents import check_contents; "
        "check_contents(sys.argv[1], read_spec(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_decoder_that_was_saved_by_itself_is_the_same_model(tmp_path: Path, is_tied: bool) -> None:
    """Qwen3-Embedding's tensors lack the name that the whole model has for its decoder."""
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=is_tied)
    whole = load(tmp_path)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / SINGLE)
    check_contents(str(tmp_path), read_spec(str(tmp_path)))
    bare = load(tmp_path)
    assert whole.keys() == bare.keys()
    assert all(torch.equal(tensor, bare[name]) for name, tensor in whole.items())


def as_part(tensors: dict[str, torch.Tensor], *, is_new: bool) -> dict[str, torch.Tensor]:
    """Return tensors by the names that they have in a model that sees, and tensors of its other parts."""
    at = "model." if is_new else ""
    named = {
        name.replace("model.", "model.language_model.") if is_new else f"language_model.{name}": tensor
        for name, tensor in tensors.items()
    }
    parts = (f"{at}vision_tower.layers.0.weight", f"{at}multi_modal_projector.weight")
    return named | {name: torch.ones(3, dtype=torch.int8) for name in parts}


@pytest.mark.parametrize("is_new", [False, True])
def test_a_decoder_that_is_a_part_of_a_model_that_sees_is_the_same(tmp_path: Path, is_new: bool) -> None:
    tensors = write_checkpoint(tmp_path)
    whole = load(tmp_path)
    save_file(as_part(tensors, is_new=is_new), tmp_path / SINGLE)
    assert read_checkpoint_spec(str(tmp_path)) == read_spec(str(tmp_path))
    part = load(tmp_path)
    assert whole.keys() == part.keys()
    assert all(torch.equal(tensor, part[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("audio_tower.weight", "audio_tower.weight is not part of"),
        ("model.layers.0.mlp.up_proj.weight", "up_proj.weight name the same tensor"),
    ],
)
def test_what_else_is_in_a_model_that_sees_is_left_over(tmp_path: Path, is_new: bool, name: str, told: str) -> None:
    tensors = as_part(write_checkpoint(tmp_path), is_new=is_new)
    save_file({**tensors, name: torch.ones(2)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=told):
        check_contents(str(tmp_path), read_spec(str(tmp_path)))


def test_what_sees_is_left_over_beside_a_whole_decoder(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    save_file({**tensors, "vision_tower.weight": torch.ones(2)}, tmp_path / SINGLE)
    assert {"vision_tower.weight is not part of" in told for told in refusals(tmp_path)} == {True}


def test_a_part_without_its_output_matrix_lacks_it(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    del tensors["lm_head.weight"]
    save_file(as_part(tensors, is_new=True), tmp_path / SINGLE)
    spec = read_checkpoint_spec(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        check_contents(str(tmp_path), spec)


def test_a_decoder_alone_makes_vectors_where_the_whole_would_have_a_head_of_its_own(tmp_path: Path) -> None:
    """Qwen3-Embedding-8B has the config.json of the whole model."""
    tensors = write_checkpoint(tmp_path)
    assert read_checkpoint_spec(str(tmp_path)).generates
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / SINGLE)
    assert {"the tensor lm_head.weight is missing" in told for told in refusals(tmp_path)} == {True}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / SINGLE)
    spec = read_checkpoint_spec(str(tmp_path))
    assert not spec.generates
    check_contents(str(tmp_path), spec)


def test_a_head_that_is_not_the_embedding_is_refused_where_they_are_said_to_be_one(tmp_path: Path) -> None:
    """transformers takes it for the output matrix, others pass it over."""
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SINGLE)
    check_contents(str(tmp_path), read_spec(str(tmp_path)))
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / SINGLE)
    (told,) = refusals(tmp_path)
    assert "tie_word_embeddings is true" in told


def test_pieces_joined_are_the_bytes_of_a_tensor(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(PIECE_BYTES, dtype=torch.int32), "b": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / SINGLE)
    with opened(tmp_path) as found:
        for name, tensor in tensors.items():
            assert b"".join(found[name].pieces()) == tensor.numpy().tobytes()
            assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), "I32" if name == "a" else "U8")
