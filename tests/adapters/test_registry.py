from __future__ import annotations

import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterError
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest
from adapters.peft_format import LoraConfig
from adapters.registry import (
    DeclaredNames,
    check_name,
    nested_adapters,
    reference,
    reference_in,
    signatures,
    sub_folders,
)
from adapters.tensor_file import TensorEntry
from tests.adapters.handmade import HOLE_BYTES, make_tensors, write, write_a_hole


def make_ref(name: str, digest: str = "d") -> AdapterRef:
    return AdapterRef(name=name, path=f"/adapters/{name}", digest=AdapterDigest(digest))


def test_a_name_may_be_declared_twice_and_two_names_may_stand_for_one_content() -> None:
    names = DeclaredNames({"base": "a base model"})
    names.declare(make_ref("one"), "base")
    names.declare(make_ref("one"), "base")
    names.declare(make_ref("two"), "base")


def test_a_name_that_is_taken_is_refused() -> None:
    names = DeclaredNames({"base": "a base model", "second": "a base model", "judge": "a cross-encoder"})
    names.declare(make_ref("json"), "base")
    with pytest.raises(AdapterError, match=r"'json' .* another adapter"):
        names.declare(make_ref("json", "other"), "base")
    with pytest.raises(AdapterError, match=r"'json' .* for the base model base already"):
        names.declare(make_ref("json"), "second")
    with pytest.raises(AdapterError, match=r"'base' .* a base model has this name"):
        names.declare(make_ref("base"), "base")
    with pytest.raises(AdapterError, match=r"'judge' .* a cross-encoder has this name"):
        names.declare(make_ref("judge"), "base")


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../x", "/etc/passwd", "..%2f", "a b", "a/b", "nul\0", "x\n", "naïve", "\ud800", "a" * 129,
        "a" * 100_000,
    ],
    ids=range(14),
)  # fmt: skip
def test_odd_names_are_refused_in_a_short_sentence(name: str) -> None:
    with pytest.raises(AdapterError, match="letters, digits") as caught:
        DeclaredNames({}).declare(make_ref(name), "base")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a", "Llama-3.1_x", "0", "a" * 128])
def test_plain_names_are_fine(name: str) -> None:
    check_name(name)


def test_the_adapters_of_a_drop_in_folder_are_its_sub_folders(tmp_path: Path) -> None:
    write(tmp_path / "b-second", tensors=make_tensors(seed=2))
    write(tmp_path / "a-first")
    write(tmp_path / ".hidden")
    (tmp_path / "notes").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_model.safetensors").touch()
    (tmp_path / "README.md").write_text("adapters")
    assert sub_folders(str(tmp_path)) == ["a-first", "b-second", "half"]
    with pytest.raises(AdapterError, match=r"'half' .* adapter_config\.json is missing"):
        reference_in(str(tmp_path), "half")
    refs = [reference_in(str(tmp_path), name) for name in ("a-first", "b-second")]
    assert refs[0].path == str((tmp_path / "a-first").resolve())
    assert refs[1].digest == adapter_digest(str(tmp_path / "b-second"))


def test_what_is_scanned_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle server with 5,600 adapters spent a sixth of a core on it."""
    for name in ("a", "b"):
        write(tmp_path / name)
    (tmp_path / "pickled").mkdir()
    for file in ("adapter_config.json", "adapter_model.pt"):
        (tmp_path / "pickled" / file).touch()
    write(tmp_path / "team" / "deep")
    stat, lookups = os.stat, list[str]()

    def noting(path: str, **options: Any) -> os.stat_result:
        lookups.append(os.path.relpath(path, tmp_path))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        for method in ("stat", "lstat"):
            patch.setattr(os, method, noting)
        found = signatures(str(tmp_path))
        nested = nested_adapters(str(tmp_path), found.keys())
    assert sorted(path for path in lookups if path.startswith(("a/", "b/"))) == [
        f"{name}/{file}" for name in "ab" for file in ("adapter_config.json", "adapter_model.safetensors")
    ]
    assert (found.keys(), nested) == ({"a", "b", "pickled"}, ["team/deep"])
    assert nested == nested_adapters(str(tmp_path))


def test_a_drop_in_folder_is_there_and_nothing_in_it_leads_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="there is no folder"):
        sub_folders(str(tmp_path / "nowhere"))
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "x")
    library = tmp_path / "library"
    library.mkdir()
    (library / "x").symlink_to(elsewhere / "x")
    with pytest.raises(AdapterError, match=r"'x' .* leads out"):
        reference_in(str(library), "x")
    assert reference_in(str(library), "x", [str(elsewhere)]).path == str((elsewhere / "x").resolve())
    write(library / "bad name")
    with pytest.raises(AdapterError, match="letters, digits"):
        reference_in(str(library), "bad name")


def test_a_reference_has_a_resolved_path_and_errors_use_the_alias(tmp_path: Path) -> None:
    write(tmp_path / "x")
    assert reference("alias", str(tmp_path / "x" / ".." / "x")).path == str((tmp_path / "x").resolve())
    with pytest.raises(AdapterError, match=r"'alias' .* folder does not exist"):
        reference("alias", str(tmp_path / "gone"))


def test_what_a_reference_is_made_of_is_checked_before_its_numbers_are_read(tmp_path: Path) -> None:
    """Gigabytes of another model were read into memory before they were refused."""
    write(tmp_path / "x")
    seen: list[tuple[str, int, int]] = []

    def check(name: str, config: LoraConfig, entry_by_name: Mapping[str, TensorEntry]) -> None:
        seen.append((name, config.rank, len(entry_by_name)))
        if name == "refused":
            raise AdapterError(name, "it does not fit")

    assert reference_in(str(tmp_path), "x", check=check) == reference_in(str(tmp_path), "x")
    assert seen == [("x", 4, 4)]
    write_a_hole(tmp_path / "x")
    tracemalloc.start()
    with pytest.raises(AdapterError, match="it does not fit"):
        reference("refused", str(tmp_path / "x"), check)
    assert tracemalloc.get_traced_memory()[1] < HOLE_BYTES / 4
    tracemalloc.stop()
