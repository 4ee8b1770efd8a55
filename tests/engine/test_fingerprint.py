from __future__ import annotations

from pathlib import Path

import pytest

from engine.loading.fingerprint import NUM_SAMPLES, SAMPLE_BYTES, model_fingerprint


def checkpoint(folder: Path, size: int = 1000) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(size))
    return str(folder)


def test_equal_weights_computed_alike_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    assert model_fingerprint(first, "bfloat16") == model_fingerprint(second, "bfloat16")
    assert model_fingerprint(first, "bfloat16") != model_fingerprint(first, "int8")


@pytest.mark.parametrize("size", [1, 1000, SAMPLE_BYTES, 3 * SAMPLE_BYTES, NUM_SAMPLES * SAMPLE_BYTES + 7])
@pytest.mark.parametrize("place", [0, -1])
def test_another_weight_at_either_end_is_another_fingerprint(tmp_path: Path, size: int, place: int) -> None:
    folder = checkpoint(tmp_path / "a", size)
    before = model_fingerprint(folder, "")
    file = tmp_path / "a" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[place] = 1
    file.write_bytes(content)
    assert model_fingerprint(folder, "") != before


def test_a_small_checkpoint_is_read_whole(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", 3 * SAMPLE_BYTES)
    file = tmp_path / "a" / "model.safetensors"
    seen = set()
    for place in range(0, 3 * SAMPLE_BYTES, SAMPLE_BYTES // 2):
        content = bytearray(3 * SAMPLE_BYTES)
        content[place] = 1
        file.write_bytes(content)
        seen.add(model_fingerprint(folder, ""))
    assert len(seen) == 6
