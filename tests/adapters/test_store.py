from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapters.catalogue import Catalogue, CatalogueChange
from adapters.errors import AdapterError
from adapters.identity import AdapterDigest, AdapterRef
from adapters.store import AdapterStore, StoreTakenError


def ref(name: str, digest: str) -> AdapterRef:
    return AdapterRef(name=name, path=f"/somewhere/{digest}", digest=AdapterDigest(digest))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(str(tmp_path / "deep" / "adapters.sqlite"), clock=lambda: 7.0)
    yield store
    store.close()


def test_nobody_else_may_read_the_file(store: AdapterStore, tmp_path: Path) -> None:
    assert (tmp_path / "deep" / "adapters.sqlite").stat().st_mode & 0o777 == 0o600


def test_another_content_is_another_version_that_takes_over(store: AdapterStore) -> None:
    assert [store.add(ref("sql", digest), "m") for digest in ("a", "b", "b", "a")] == [1, 2, 2, 3]
    entry = store.catalogue().entries["sql"]
    assert [(version.number, version.ref.digest) for version in entry.versions] == [(1, "a"), (2, "b"), (3, "a")]
    assert entry.split == ((3, 100),)
    assert entry.versions[0].created_s == 7


def test_names_outlive_the_process(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    first = AdapterStore(path)
    first.add(ref("sql", "a"), "m")
    first.add(ref("sql", "b"), "m")
    first.route("sql", {1: 90, 2: 10})
    before = first.catalogue()
    first.close()
    second = AdapterStore(path)
    assert second.catalogue() == before
    second.close()


def test_a_store_of_a_release_without_classifiers_opens(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    first = AdapterStore(path)
    first.add(ref("sql", "a"), "m")
    first.close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE head")
    second = AdapterStore(path)
    second.add(replace(ref("mood", "b"), num_labels=2), "m")
    found = {name: entry.versions[0].ref.num_labels for name, entry in second.catalogue().entries.items()}
    assert found == {"mood": 2, "sql": 0}
    second.close()


@pytest.mark.parametrize("own", [{"invocation_ids": (7, 0)}, {"num_labels": 3}])
def test_invocation_tokens_and_labels_belong_to_their_version(tmp_path: Path, own: dict[str, Any]) -> None:
    path = str(tmp_path / "adapters.sqlite")
    activated = replace(ref("sql", "b"), **own)
    for _ in range(2):
        store = AdapterStore(path)
        store.add(ref("sql", "a"), "m")
        store.add(activated, "m")
        versions = store.catalogue().entries["sql"].versions
        assert [version.ref for version in versions[-2:]] == [ref("sql", "a"), activated]
        store.remove("sql")
        store.close()


def test_a_store_has_one_owner_and_none_after_its_death(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    script = f"from adapters.store import AdapterStore; import os; AdapterStore({path!r}); os._exit(9)"
    for holder in ("long", "me"):
        owner = AdapterStore(path, holder=holder)
        with pytest.raises(StoreTakenError) as taken:
            AdapterStore(path, holder="you")
        assert taken.value.holder == holder
        owner.close()
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    AdapterStore(path).close()


def test_removing_a_version_gives_its_share_to_those_with_traffic_or_else_to_the_newest(store: AdapterStore) -> None:
    for digest in "abcd":
        store.add(ref("sql", digest), "m")
    store.route("sql", {1: 0, 2: 100})
    assert store.catalogue().entries["sql"].split == ((2, 100),)
    store.route("sql", {1: 50, 2: 30, 3: 20})
    store.remove("sql", 1)
    assert store.catalogue().entries["sql"].split == ((2, 60), (3, 40))
    store.remove("sql", 2)
    store.remove("sql", 3)
    assert store.catalogue().entries["sql"].split == ((4, 100),)
    store.remove("sql", 4)
    assert store.catalogue().entries == {}


def test_a_canary_that_is_withdrawn_leaves_its_traffic_to_who_had_it_before(store: AdapterStore) -> None:
    """It went to a newer version, which had been rolled back from."""
    for digest in "ab":
        store.add(ref("sql", digest), "m")
    store.route("sql", {1: 100})
    store.add(ref("sql", "c"), "m", percent=10)
    store.remove("sql", 3)
    assert store.catalogue().entries["sql"].split == ((1, 100),)


def test_a_number_never_stands_for_another_content(store: AdapterStore) -> None:
    """Whoever asked for `sql@2` got what was loaded next."""
    for digest in "abc":
        store.add(ref("sql", digest), "m")
    store.remove("sql", 3)
    store.remove("sql", 2)
    assert store.add(ref("sql", "d"), "m") == 4
    store.remove("sql")
    assert store.add(ref("sql", "e"), "m") == 5
    assert store.add(ref("other", "e"), "m") == 1


def test_what_was_told_outlives_the_process(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    store = AdapterStore(path)
    assert (store.build, store.told("sql")) == ("", None)
    store.tell([("sql", AdapterDigest("a"), "1"), ("other", AdapterDigest("b"), "")], "first")
    store.tell([("sql", AdapterDigest("c"), "2")])
    store.close()
    store = AdapterStore(path)
    assert (store.build, store.told("sql"), store.told("other")) == ("first", "c", "b")
    assert store.signatures() == {"sql": "2", "other": ""}
    assert store.catalogue().revision == 0
    store.close()


def test_what_is_wrong_is_refused_and_changes_nothing(store: AdapterStore) -> None:
    store.add(ref("sql", "a"), "m")
    before = store.catalogue()
    for change in (
        lambda: store.add(ref("sql", "b"), "other"),
        lambda: store.add(ref("no/name", "b"), "m"),
        lambda: store.route("other", {1: 100}),
        lambda: store.route("sql", {2: 100}),
        lambda: store.route("sql", {1: 99}),
        lambda: store.route("sql", {1: 100, 2: 0}),
        lambda: store.route("sql", {}),
        lambda: store.remove("other"),
        lambda: store.remove("sql", 5),
    ):
        with pytest.raises(AdapterError):
            change()
        assert store.catalogue() == before


@pytest.mark.parametrize("step", [(sqlite3.SQLITE_UPDATE, "revision"), (sqlite3.SQLITE_TRANSACTION, "COMMIT")])
def test_a_change_whose_end_fails_is_none_and_hinders_no_other(store: AdapterStore, step: tuple[int, str]) -> None:
    """Its transaction stayed open, and every later change was refused until the process ended."""
    store.add(ref("sql", "a"), "m")
    before = store.catalogue()
    store._database.set_authorizer(
        lambda action, what, *_: sqlite3.SQLITE_DENY if (action, what) == step else sqlite3.SQLITE_OK
    )
    with pytest.raises(sqlite3.DatabaseError):
        store.add(ref("sql", "b"), "m")
    assert store.catalogue() == before
    store._database.set_authorizer(None)
    assert store.add(ref("sql", "c"), "m") == 2


def numbers(store: AdapterStore) -> list[int]:
    return [version.number for version in store.catalogue().entries["sql"].versions]


def test_the_oldest_versions_without_traffic_make_room(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    store = AdapterStore(path, max_versions=4)
    for index in range(200):
        store.add(ref("sql", f"d{index}"), "m")
    assert numbers(store) == [197, 198, 199, 200]
    store.route("sql", {197: 90, 199: 10})
    store.add(ref("sql", "trial"), "m", percent=0)
    assert numbers(store) == [197, 198, 199, 200, 201]
    assert store.catalogue().entries["sql"].split == ((197, 90), (199, 10))
    store.add(ref("sql", "trial"), "m", percent=0)
    assert numbers(store) == [197, 198, 199, 200, 201]
    store.close()
    store = AdapterStore(path, max_versions=2)
    store.route("sql", {201: 100})
    store.add(ref("sql", "more"), "m")
    assert numbers(store) == [201, 202]
    store.close()


def test_no_version_makes_room_before_it_is_needed_nor_the_last_that_was_no_trial() -> None:
    store = AdapterStore(":memory:", max_versions=6)
    for index in range(6):
        store.add(ref("sql", f"d{index}"), "m")
        assert numbers(store) == [*range(1, index + 2)]
    store.route("sql", {1: 100})
    for index in range(8):
        store.add(ref("sql", f"trial{index}"), "m", percent=0)
    # Those on trial have the same bound, and take the place of their like.
    assert numbers(store) == [1, 2, 3, 4, 5, 6, *range(9, 15)]
    store.route("sql", {1: 50, 9: 50})
    # The sixth is the newest that has had traffic.
    assert numbers(store) == [1, 3, 4, 5, 6, *range(9, 15)]
    store.route("sql", {1: 25, 10: 25, 11: 25, 12: 25})
    assert numbers(store) == [1, 6, *range(9, 15)]
    store.close()


def test_a_version_on_trial_that_is_withdrawn_has_cost_no_other() -> None:
    """A canary that failed cost a name at its limit the oldest version, perhaps the one to roll back to."""
    store = AdapterStore(":memory:", max_versions=3)
    for digest in "abc":
        store.add(ref("sql", digest), "m")
    for number in (4, 5):
        assert store.add(ref("sql", f"canary{number}"), "m", percent=0) == number
        store.remove("sql", number)
        assert numbers(store) == [1, 2, 3]
    store.add(ref("sql", "canary6"), "m", percent=0)
    store.route("sql", {6: 100})
    assert numbers(store) == [2, 3, 6]
    store.close()


def test_versions_with_traffic_and_the_newest_make_no_room() -> None:
    store = AdapterStore(":memory:", max_versions=3)
    for digest in "abc":
        store.add(ref("sql", digest), "m")
    store.route("sql", {1: 50, 2: 50})
    before = store.catalogue()
    for percent in (0, 10, 100):
        with pytest.raises(AdapterError, match="3 versions, and too few without traffic to make room; unload some"):
            store.add(ref("sql", "more"), "m", percent=percent)
    assert store.catalogue() == before
    store.add(ref("other", "more"), "m")
    store.close()


def test_changes_that_are_made_together_are_one_and_fail_one_by_one(tmp_path: Path) -> None:
    path = str(tmp_path / "adapters.sqlite")
    store = AdapterStore(path)
    store.add(ref("b", "x"), "m")
    before = store.catalogue()
    with store.together():
        for name in ("c", "a"):
            store.add(ref(name, "y"), "m")
        with pytest.raises(AdapterError, match="base model m"):
            store.add(ref("b", "z"), "other")
        store.remove("b")
        assert "a" in store.catalogue().entries
    assert list(store.catalogue().entries) == ["a", "c"]
    assert list(before.entries) == ["b"], "what was told of does not change"

    def fail() -> None:
        with store.together():
            store.remove("a")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    store.close()
    again = AdapterStore(path)
    assert again.catalogue() == store.catalogue()
    assert (list(again.catalogue().entries), again.catalogue().revision) == (["a", "c"], before.revision + 3)
    again.close()


def test_a_catalogue_is_told_whole_to_who_has_another_or_one_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.store.MAX_CHANGES", 2)
    store = AdapterStore(":memory:")
    told = [store.catalogue()]
    for digest in "wxyz":
        store.add(ref("sql", digest), "m")
        told.append(store.catalogue())
    now = told[-1]
    assert store.since("other", now.revision) == now
    changes = [store.since(now.store, before.revision) for before in told]
    assert changes[:3] == [now] * 3
    assert isinstance(changes[3], CatalogueChange)
    assert changes[4] is None
    assert store.since(now.store, now.revision + 1) == now


class Watched(AdapterStore):
    """Followed by another thread that looks whenever a catalogue has just been set."""

    told: Catalogue | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_catalogue" and self.told is not None:
            change = self.since(self.told.store, self.told.revision)
            assert isinstance(change, CatalogueChange)
            self.told = self.told.after(change)
            assert self.told == value


def test_a_change_is_told_from_the_moment_it_is_there() -> None:
    """A gateway that asked in between would have lacked the name for good."""
    store = Watched(":memory:")
    store.told = store.catalogue()
    store.add(ref("sql", "x"), "m")
    store.add(ref("sql", "y"), "m")
    store.remove("sql")
    store.close()


def test_changes_that_were_undone_are_not_told() -> None:
    store = AdapterStore(":memory:")
    before = store.catalogue()

    def fail() -> None:
        with store.together():
            store.add(ref("gone", "x"), "m")
            store.add(ref("gone", "y"), "m")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    store.add(ref("sql", "x"), "m")
    change = store.since(before.store, before.revision)
    assert isinstance(change, CatalogueChange)
    assert (list(change.entries), before.after(change)) == (["sql"], store.catalogue())


def test_who_is_on_trial_inherits_no_traffic_and_is_not_the_latest() -> None:
    """While a canary of version 2 still ran, `sql@latest` was version 2, and so was `sql` once 1 was unloaded."""
    store = AdapterStore(":memory:")
    store.add(ref("sql", "a"), "m")
    store.add(ref("sql", "b"), "m", percent=0)
    found = store.catalogue().find("sql@latest", 0.0)
    assert found is not None
    assert found[1].number == 1
    store.remove("sql", 1)
    assert [store.catalogue().find(name, 0.0) is None for name in ("sql", "sql@latest", "sql@2")] == [True, True, False]
    store.route("sql", {2: 100})
    store.add(ref("sql", "c"), "m")
    store.route("sql", {2: 100})
    found = store.catalogue().find("sql@latest", 0.0)
    assert found is not None
    assert found[1].number == 3, "who was routed away from is not on trial again"
    store.close()


class Stored(RuleBasedStateMachine):
    """Whatever happens, every name has versions, and its traffic makes 100."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.opened()
        self.revision = self.store.catalogue().revision
        self.told = [self.store.catalogue()]

    def opened(self) -> AdapterStore:
        return AdapterStore(f"{self.folder.name}/adapters.sqlite", clock=lambda: 7.0)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(name=st.sampled_from("ab"), digest=st.sampled_from("xyz"), percent=st.integers(0, 100))
    def add(self, name: str, digest: str, percent: int) -> None:
        before = self.store.catalogue().entries.get(name)
        number = self.store.add(ref(name, digest), "m", percent=percent)
        entry = self.store.catalogue().entries[name]
        version = entry.version(number)
        assert version is not None
        assert version.ref.digest == digest
        if percent:
            assert entry.latest == version
            others = () if before is None else [other for other, _ in before.split if other != number]
            assert dict(entry.split)[number] == (percent if others else 100)
        else:
            assert entry.latest == (None if before is None else before.latest)
            assert entry.split == (() if before is None else before.split)

    @rule(name=st.sampled_from("ab"), split=st.dictionaries(st.integers(1, 4), st.integers(1, 100), max_size=3))
    def route(self, name: str, split: dict[int, int]) -> None:
        try:
            self.store.route(name, split)
        except AdapterError:
            return
        assert dict(self.store.catalogue().entries[name].split) == split

    @rule(name=st.sampled_from("ab"), number=st.none() | st.integers(1, 4))
    def remove(self, name: str, number: int | None) -> None:
        before = self.store.catalogue().entries.get(name)
        try:
            self.store.remove(name, number)
        except AdapterError:
            return
        entry = self.store.catalogue().entries.get(name)
        if entry is not None and before is not None and before.split != ((number, 100),):
            assert dict(entry.split).keys() == dict(before.split).keys() - {number}, "nobody else gets traffic"
        assert entry is None or (number is not None and entry.version(number) is None)

    @rule()
    def reopen(self) -> None:
        """What was told of one change after the other is what stands there."""
        before = self.store.catalogue()
        self.store.close()
        self.store = self.opened()
        assert self.store.catalogue() == before
        assert list(self.store.catalogue().entries) == list(before.entries)
        self.told = [before]

    @invariant()
    def what_was_told_earlier_and_what_has_changed_since_is_what_stands_there(self) -> None:
        now = self.store.catalogue()
        for before in self.told:
            change = self.store.since(before.store, before.revision)
            if change is None:
                assert before == now
                continue
            assert isinstance(change, CatalogueChange)
            after = before.after(change)
            assert after == now
            assert list(after.entries) == list(now.entries)
            assert len(change.entries) <= now.revision - before.revision
        self.told.append(now)

    @invariant()
    def every_name_is_whole(self) -> None:
        catalogue = self.store.catalogue()
        assert catalogue.revision >= self.revision
        self.revision = catalogue.revision
        for entry in catalogue.entries.values():
            assert entry.versions
            assert sum(percent for _, percent in entry.split) == (0 if entry.latest is None else 100)
            serving = [entry.version(number) for number, _ in entry.split]
            assert all(version is not None and not version.is_on_trial for version in serving)


TestStored = Stored.TestCase
TestStored.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
