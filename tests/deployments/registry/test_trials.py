from __future__ import annotations

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue
from adapters.identity import AdapterDigest, AdapterRef
from adapters.store import AdapterStore
from deployments.registry.trials import Trials

VERSION = AdapterVersion(number=1, ref=AdapterRef(name="x", path="/x", digest=AdapterDigest("d")), created_s=0)
EMPTY = Catalogue()
FULL = Catalogue(entries={"x": AdapterEntry(name="x", base="m", versions=(VERSION,), split=())})


def test_a_version_is_there_for_its_trials_alone_until_the_last_fails_or_it_is_kept() -> None:
    store = AdapterStore(":memory:")
    trials = Trials(store)
    trials.note("x", 1, EMPTY, is_tried=True)
    trials.note("x", 1, FULL, is_tried=True)
    assert [trials.fail("x", 1), trials.fail("x", 1), trials.fail("x", 1)] == [False, True, False]
    trials.note("x", 2, FULL, is_tried=True)
    trials.note("x", 2, FULL, is_tried=False)
    trials.note("x", 1, FULL, is_tried=True)
    assert not trials.fail("x", 2)
    assert not trials.fail("x", 1)
    assert store.tried() == {("x", 1)}
