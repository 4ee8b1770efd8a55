from __future__ import annotations

from pathlib import Path

from adapters.registry import reference
from adapters.store import AdapterStore
from deployments.config import AdapterBase
from deployments.registry.misfits import misfits
from tests.adapters.handmade import SHAPES, write


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
