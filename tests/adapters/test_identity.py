from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterError
from adapters.identity import adapter_digest, content_digest
from adapters.peft_format import parse_config
from adapters.tensor_file import TensorEntry, TensorFile
from tests.adapters.handmade import make_config, make_tensors, write


def test_the_digest_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    assert adapter_digest(one) == adapter_digest(two)
    assert len(adapter_digest(one)) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 8},
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4, "x": 5}},
        {"alpha_pattern": {"x": 5, "q_proj": 4}},
        {"alora_invocation_tokens": [4]},
        {"trainable_token_indices": [1]},
    ],
)
def test_a_field_that_changes_the_result_changes_the_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain = adapter_digest(write(tmp_path / "plain"))
    assert adapter_digest(write(tmp_path / "changed", make_config(**changes))) != plain


def test_the_order_of_patterns_counts(tmp_path: Path) -> None:
    patterns = {"q_proj": 4, "self_attn.q_proj": 5}
    one = write(tmp_path / "one", make_config(alpha_pattern=patterns))
    two = write(tmp_path / "two", make_config(alpha_pattern=dict(reversed(patterns.items()))))
    assert adapter_digest(one) != adapter_digest(two)


def test_tokens_count_by_their_modules_and_in_the_order_of_their_rows(tmp_path: Path) -> None:
    values = ([1, 2], [2, 1], [1, 2, 3], {"lm_head": [1, 2]}, {"embed_tokens": [1], "lm_head": [2]})
    folders = [write(tmp_path / f"{i}", make_config(trainable_token_indices=value)) for i, value in enumerate(values)]
    assert len({adapter_digest(folder) for folder in folders}) == len(values)
    none = [write(tmp_path / f"no {value}", make_config(trainable_token_indices=value)) for value in (None, [], {})]
    assert {adapter_digest(folder) for folder in none} == {adapter_digest(write(tmp_path / "plain"))}


def test_fields_of_training_and_their_order_do_not_count(tmp_path: Path) -> None:
    plain = adapter_digest(write(tmp_path / "plain"))
    config = dict(reversed(make_config(lora_dropout=0.3, base_model_name_or_path="/x", inference_mode=True).items()))
    assert adapter_digest(write(tmp_path / "other", config)) == plain


def test_what_else_lies_in_the_folder_is_no_part_of_an_adapter(tmp_path: Path) -> None:
    plain = adapter_digest(write(tmp_path / "plain"))
    other = write(tmp_path / "other")
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json", "modeling.py", "adapter_model.bin"):
        # Opening one of them fails for everybody, root included.
        (tmp_path / "other" / name).symlink_to(name)
    assert adapter_digest(other) == plain


def test_any_change_of_a_tensor_changes_the_digest(tmp_path: Path) -> None:
    digests = {adapter_digest(write(tmp_path / "plain"))}
    name = next(iter(make_tensors()))
    bumped = make_tensors()
    bumped[name][0, 0] += 1e-6
    halved = {key: value.half() for key, value in make_tensors().items()}
    reshaped = make_tensors()
    reshaped[name] = reshaped[name].T.contiguous()
    renamed = make_tensors()
    renamed[name.replace("layers.0", "layers.7")] = renamed.pop(name)
    for index, tensors in enumerate((bumped, halved, reshaped, renamed)):
        digests.add(adapter_digest(write(tmp_path / str(index), tensors=tensors)))
    assert len(digests) == 5


def test_bytes_cannot_be_moved_from_one_tensor_to_its_neighbour(tmp_path: Path) -> None:
    one = {"a": torch.arange(6.0)[:2].clone(), "b": torch.arange(6.0)[2:].clone()}
    two = {"a": torch.arange(6.0)[:4].clone(), "b": torch.arange(6.0)[4:].clone()}
    assert adapter_digest(write(tmp_path / "1", tensors=one)) != adapter_digest(write(tmp_path / "2", tensors=two))


DATA = bytes(range(24))


def digest_of(*entries: tuple[str, str, tuple[int, ...], int, int], **changes: Any) -> str:
    """Of tensors (name, dtype, shape, start, end) over the same bytes."""
    config = parse_config("demo", json.dumps(make_config(**changes)).encode())
    by_name = {
        name: TensorEntry(name=name, dtype=dtype, shape=shape, start=start, end=end)
        for name, dtype, shape, start, end in entries
    }
    return content_digest(config, TensorFile(entry_by_name=by_name, data=bytearray(DATA)))


def test_equal_bytes_under_other_names_types_or_shapes_are_another_adapter() -> None:
    a, b = ("a", "F16", (2, 3), 0, 12), ("b", "F16", (6,), 12, 24)
    digests = [
        digest_of(a, b),
        digest_of(a, ("c", *b[1:])),
        digest_of(("a", "BF16", *a[2:]), b),
        digest_of((*a[:2], (3, 2), *a[3:]), b),
        digest_of(("a", "F16", (4,), 0, 8), ("b", "F16", (8,), 8, 24)),
        digest_of(("a", "F16", (12,), 0, 24)),
        digest_of(a, b, alpha_pattern={"q_proj": 4}),
        digest_of(a, b, rank_pattern={"q_proj": 4}),
    ]
    assert len(set(digests)) == len(digests)
    # Where in its file a tensor lies, and what else lies there, is no part of it.
    assert digest_of(b, a) == digest_of(a, b)
    assert digest_of(("a", "F16", (1,), 4, 6)) != digest_of(("a", "F16", (1,), 6, 8))


def test_the_digest_stays_what_it_is() -> None:
    """Registries keep names by it, and caches on disk: with another one, every adapter would be a new one to them."""
    assert digest_of(("b", "F16", (6,), 12, 24), ("a", "F16", (2, 3), 0, 12), rank_pattern={"x": 3}) == (
        "7c030e87b3cefd2ff02c1ef6eadc4a98e63f16c761c0935f66f091c8dc037347"
    )


def test_a_pickle_alone_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine")
    os.rename(tmp_path / "mine" / "adapter_model.safetensors", tmp_path / "mine" / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle"):
        adapter_digest(folder)


def test_errors_name_the_folder_or_the_alias_and_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(AdapterError, match=r"'empty' .* adapter_config\.json is missing") as caught:
        adapter_digest(str(folder))
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(AdapterError, match="'alias'"):
        adapter_digest(str(folder), "alias")


def test_a_configuration_that_links_out_or_is_huge_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder)
    write(tmp_path / "other")
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(os.path.join("..", "other", "adapter_config.json"))
    with pytest.raises(AdapterError, match="leads out"):
        adapter_digest(str(folder))
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").write_bytes(b" " * (1 << 21))
    with pytest.raises(AdapterError, match="longer than"):
        adapter_digest(str(folder))


def test_identity_needs_no_tensor_library() -> None:
    program = "import sys, adapters.identity; print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
