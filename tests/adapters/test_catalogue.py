from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue
from adapters.identity import AdapterDigest, AdapterRef


def version(number: int) -> AdapterVersion:
    ref = AdapterRef(name="sql", path=f"/{number}", digest=AdapterDigest(f"d{number}"))
    return AdapterVersion(number=number, ref=ref, created_s=0)


CATALOGUE = Catalogue(
    entries={
        "sql": AdapterEntry(
            name="sql", base="m", versions=(version(1), version(2), version(4)), split=((1, 30), (2, 70))
        )
    }
)


@pytest.mark.parametrize(
    ("name", "draw", "number"),
    [
        ("sql", 0.0, 1),
        ("sql", 0.299, 1),
        ("sql", 0.3, 2),
        ("sql", 0.999, 2),
        ("sql@4", 0.0, 4),
        ("sql@1", 0.9, 1),
        ("sql@latest", 0.0, 4),
    ],
)
def test_a_name_stands_for_its_split_and_a_version_for_itself(name: str, draw: float, number: int) -> None:
    found = CATALOGUE.find(name, draw)
    assert found is not None
    assert found[1].number == number


@pytest.mark.parametrize(
    "name", ["other", "sql@3", "sql@01", "sql@", "sql@x", "sql@-1", "sql@1@1", "sql@²", "sql@" + "9" * 400, "@1"]
)
def test_what_does_not_exist_stands_for_nothing(name: str) -> None:
    assert CATALOGUE.find(name, 0.0) is None


def test_all_contents_are_known() -> None:
    assert CATALOGUE.digests() == {"d1", "d2", "d4"}


def test_the_newest_that_is_left_takes_over_who_had_all_of_the_traffic() -> None:
    entry = replace(CATALOGUE.entries["sql"], split=((1, 100),))
    assert [entry.split_without(number) for number in (1, 2, 4)] == [{4: 100}, {1: 100}, {1: 100}]
    assert replace(entry, versions=entry.versions[:1]).split_without(1) == {}
    on_trial = replace(version(4), is_on_trial=True)
    assert replace(entry, versions=(version(1), on_trial), split=()).split_without(4) == {}
    assert replace(entry, versions=(version(1), on_trial)).split_without(1) == {}


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.integers(0, 7))
def test_those_with_traffic_share_what_another_had_in_proportion(weights: list[int], index: int) -> None:
    entry = replace(CATALOGUE.entries["sql"], split=())
    shares = replace(entry, split=tuple(enumerate(weights[1:], 1))).split_with(9, min(weights[0], 99))
    entry = replace(entry, split=tuple(shares.items()))
    number = list(shares)[index % len(shares)]
    found = entry.split_without(number)
    others = {other: share for other, share in shares.items() if other != number}
    assert (sum(found.values()), found.keys()) == (100, others.keys())
    for other, share in others.items():
        assert abs(found[other] - 100 * share / sum(others.values())) <= 1


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 100), st.integers(1, 10))
def test_a_version_gets_its_share_and_the_others_keep_their_proportions(
    weights: list[int], percent: int, number: int
) -> None:
    entry = replace(CATALOGUE.entries["sql"], split=tuple(enumerate(weights, 1)))
    found = entry.split_with(number, percent)
    assert sum(found.values()) == 100
    assert min(found.values()) >= 1
    others = {other: weight for other, weight in entry.split if other != number}
    assert found.pop(number) == (percent if others else 100)
    for other, weight in others.items():
        assert abs(found.get(other, 0) - (100 - percent) * weight / sum(others.values())) <= 1


def test_what_a_base_model_s_names_no_longer_stand_for_is_gone_there_though_another_s_do() -> None:
    entry = CATALOGUE.entries["sql"]
    other = replace(entry, name="other", base="n", versions=entry.versions[:1], split=((1, 100),))
    same = replace(entry, name="same", versions=entry.versions[1:2], split=((2, 100),))
    before = Catalogue(entries={"sql": entry, "other": other, "same": same})
    after = Catalogue(entries={"other": other, "same": same})
    assert [ref.digest for ref in after.gone("sql", before)] == ["d1", "d4"]
    assert after.gone("nobody", before) == ()
