from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from engine.loading import checkpoint
from engine.loading.checkpoint import load_parameters, tensor_reader
from engine.loading.contents import StoredTensor, opened
from engine.loading.weight_files import INDEX, SINGLE
from tests.engine.checkpoint_folder import write_checkpoint, write_config

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_parameters(str(folder), read_spec(str(folder)), dtype, CPU))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Save in two files; returns the index's map."""
    names = sorted(tensors)
    file_by_name = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(file_by_name.values()):
        save_file({name: tensors[name] for name in names if file_by_name[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_by_name}))
    return file_by_name


def test_parameters_are_the_tensors_stacked(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    found = load(tmp_path)
    prefix = "model.layers.1.self_attn"
    stacked = torch.cat([tensors[f"{prefix}.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(found["layers.1.qkv.weight"], stacked)
    assert torch.equal(found["head"], tensors["lm_head.weight"])


@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_cast_to_the_dtype_asked_for(tmp_path: Path, saved: torch.dtype) -> None:
    tensors = {name: tensor.to(saved) for name, tensor in write_checkpoint(tmp_path).items()}
    save_file(tensors, tmp_path / SINGLE)
    found = load(tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert torch.equal(found["layers.0.o.weight"], tensors["model.layers.0.self_attn.o_proj.weight"].bfloat16())


def test_parameters_outlive_the_files(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    found = load(tmp_path)
    size = (tmp_path / SINGLE).stat().st_size
    (tmp_path / SINGLE).write_bytes(b"\0" * size)
    assert torch.equal(found["embedding"], tensors["model.embed_tokens.weight"])


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    whole = load(tmp_path)
    (tmp_path / SINGLE).unlink()
    save_shards(tmp_path, tensors)
    sharded = load(tmp_path)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in whole.items())


def test_a_tied_checkpoint_may_hold_its_head_twice(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "head" not in load(tmp_path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / SINGLE)
    assert "head" not in load(tmp_path)


def test_buffers_of_old_exports_are_passed_over(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / SINGLE)
    assert load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    del tensors[Q]
    save_file(tensors, tmp_path / SINGLE)
    assert f"the tensor {Q} is missing" in refusal(tmp_path)


def test_a_tensor_left_over_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    tensors["model.layers.2.self_attn.q_proj.weight"] = tensors[Q].clone()
    save_file(tensors, tmp_path / SINGLE)
    assert "the tensor model.layers.2.self_attn.q_proj.weight is not part of" in refusal(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    tensors[Q] = torch.zeros(16, 15)
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path)
    assert Q in message
    assert "[16, 15]" in message
    assert "[16, 16]" in message


def test_a_dtype_that_is_no_weight_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    tensors[Q] = tensors[Q].to(torch.int8)
    save_file(tensors, tmp_path / SINGLE)
    message = refusal(tmp_path)
    assert Q in message
    assert "I8" in message


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    write_checkpoint(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:kept])
    message = refusal(tmp_path)
    assert SINGLE in message
    assert "not a complete safetensors file" in message


def test_a_header_that_claims_the_earth_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    assert "not a complete safetensors file" in refusal(tmp_path)
    header = json.dumps({Q: {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    assert "not a complete safetensors file" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert f"neither {SINGLE} nor {INDEX}" in refusal(tmp_path)


def test_pickled_weights_are_named_and_not_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "can run code" in message


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    (tmp_path / SINGLE).unlink()
    file = save_shards(tmp_path, tensors)[Q]
    (tmp_path / file).unlink()
    assert file in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    (tmp_path / SINGLE).unlink()
    file_by_name = save_shards(tmp_path, tensors)
    other = next(file for file in file_by_name.values() if file != file_by_name[Q])
    save_file({**load_file(tmp_path / other), Q: tensors[Q]}, tmp_path / other)
    assert Q in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    tensors = write_checkpoint(folder)
    (folder / SINGLE).rename(tmp_path / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    assert "no such file in the folder" in refusal(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path)


def test_the_files_are_opened_once_for_all_that_an_adapter_needs_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were for each tensor: some adapters of large models took ten seconds for it."""
    tensors = write_checkpoint(tmp_path)
    num_opened = 0

    @contextmanager
    def counted(folder: Path, framework: str) -> Iterator[Mapping[str, StoredTensor]]:
        nonlocal num_opened
        num_opened += 1
        with opened(folder, framework) as found:
            yield found

    monkeypatch.setattr(checkpoint, "opened", counted)
    spec = read_spec(str(tmp_path))
    with tensor_reader(str(tmp_path), spec):
        pass
    assert not num_opened, "most adapters need none"
    with tensor_reader(str(tmp_path), spec) as read:
        for name, tensor in tensors.items():
            assert torch.equal(read(name, torch.float32), tensor)
        with pytest.raises(CheckpointError, match="another is missing"):
            read("another", torch.float32)
    assert num_opened == 1
