from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.loading.weight_files import INDEX, SINGLE, check_weight_files, weight_files
from tests.architecture.source_tree import ROOT

WHOLE = (2).to_bytes(8, "little") + b"{}"


def test_whole_files_are_good(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(WHOLE)
    check_weight_files(tmp_path)


@pytest.mark.parametrize("content", [b"", WHOLE[:-1], WHOLE + b"left over"])
def test_a_shard_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(WHOLE)
    (tmp_path / "b.safetensors").write_bytes(content)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors: not a complete safetensors file"):
        check_weight_files(tmp_path)


def test_a_clone_without_its_large_files_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n")
    with pytest.raises(CheckpointError, match="a pointer of Git LFS"):
        check_weight_files(tmp_path)


def test_an_index_of_other_files_says_nothing_of_one_that_holds_all(tmp_path: Path) -> None:
    """Quantized checkpoints bring the index of the one that they were made of."""
    (tmp_path / SINGLE).write_bytes(WHOLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / SINGLE]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.safetensors", "a name that is not Hugging Face's"),
        ("pytorch_model-00001-of-00002.bin", "pickled weights can run code"),
        ("model-Q4_K_M.gguf", "only safetensors are read"),
    ],
)
def test_weights_of_another_kind_are_named(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WHOLE)
    with pytest.raises(CheckpointError, match=words) as caught:
        weight_files(tmp_path)
    assert f"It has {name}, " in str(caught.value)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    """Who checks a configuration waits for nothing else."""
    (tmp_path / SINGLE).write_bytes(WHOLE)
    program = (
        "import sys; from pathlib import Path; from engine.loading.weight_files import check_weight_files; "
        "check_weight_files(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
