from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adapters.registry import reference
from adapters.store import AdapterStore
from deployments.config import AdapterBase
from deployments.registry.misfits import misfits
from tests.adapters.handmade import SHAPES, make_tensors, write


def test_what_a_base_model_cannot_serve_is_found_with_the_reason(tmp_path: Path) -> None:
    store = AdapterStore(":memory:")
    fits, lost = (reference(name, write(tmp_path / name)) for name in ("fits", "lost"))
    for ref, base in ((fits, "same"), (lost, "gone")):
        store.add(ref, base)
    bases = [AdapterBase(name="same", module_shapes=SHAPES, max_rank=16)]
    assert misfits(store.catalogue(), bases, known_to_fit=()) == {"same": {}}
    wider = {name: tuple(2 * size for size in shape) for name, shape in SHAPES.items()}
    bases = [AdapterBase(name="same", module_shapes=wider, max_rank=16)]
    found = misfits(store.catalogue(), bases, known_to_fit=())
    assert list(found["same"]) == [fits.digest]
    assert "the base model needs [4, 32]" in found["same"][fits.digest]
    assert misfits(store.catalogue(), bases, known_to_fit=[fits.digest]) == {"same": {}}


def test_what_was_overwritten_or_deleted_where_it_is_read_is_found(tmp_path: Path) -> None:
    store = AdapterStore(":memory:")
    for name in ("kept", "overwritten", "deleted"):
        store.add(reference(name, write(tmp_path / name, tensors=make_tensors(seed=len(name)))), "m")
    write(tmp_path / "overwritten", tensors=make_tensors(seed=1))
    shutil.rmtree(tmp_path / "deleted")
    found = misfits(store.catalogue(), [AdapterBase(name="m", module_shapes=SHAPES, max_rank=16)], known_to_fit=())
    deleted, overwritten = found["m"].values()
    assert "does not exist" in deleted
    assert "have been overwritten" in overwritten


@pytest.mark.parametrize("lost", ["a", "b"])
def test_what_one_name_has_lost_and_another_has_fits(tmp_path: Path, lost: str) -> None:
    """The other name was listed as a misfit, too, though it was served."""
    store = AdapterStore(":memory:")
    for name in "ab":
        store.add(reference(name, write(tmp_path / name, tensors=make_tensors(seed=0))), "m")
    write(tmp_path / lost, tensors=make_tensors(seed=1))
    bases = [AdapterBase(name="m", module_shapes=SHAPES, max_rank=16)]
    assert misfits(store.catalogue(), bases, known_to_fit=()) == {"m": {}}
