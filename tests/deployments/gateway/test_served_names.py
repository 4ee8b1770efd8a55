from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue
from adapters.identity import AdapterDigest, AdapterRef
from deployments.classifiers.reranking import Rerankers
from deployments.config import ChannelConfig, GatewayConfig, RerankerConfig
from deployments.gateway.served_names import ServedNames
from deployments.registry.adapter_directory import AdapterDirectory
from deployments.siblings import Siblings
from engine.errors import RequestError
from tests.deployments.registry.test_adapter_directory import MODEL

UNASKED: Any = None


@pytest.fixture
def names() -> ServedNames:
    config = GatewayConfig(models=(MODEL,), channel=ChannelConfig(secret=b""), created_s=5)
    adapters = AdapterDirectory("g", [MODEL], {"m": UNASKED}, None)
    return ServedNames(config, adapters, Rerankers([], {}))


def test_a_version_is_described_as_it_is_asked_for_and_not_listed(names: ServedNames) -> None:
    assert [card.name for card in names.cards()] == ["m", "sql"]
    for name, parent in (("m", None), ("sql", "m"), ("sql@1", "m"), ("sql@latest", "m")):
        names.target(name)
        assert names.has(name)
        card = names.card(name)
        assert card is not None
        assert (card.name, card.parent, card.created_s, card.max_model_len) == (name, parent, 5, 64)


def test_adapters_are_listed_behind_their_own_base_and_rerankers_last() -> None:
    models = (MODEL, replace(MODEL, name="other", adapters=()))
    config = GatewayConfig(models=models, channel=ChannelConfig(secret=b""), created_s=5)
    adapters = AdapterDirectory("g", models, {"m": UNASKED, "other": UNASKED}, None)
    rerankers = Rerankers([RerankerConfig(name="judge", model_path="", max_tokens=9)], {"judge": UNASKED})
    names = ServedNames(config, adapters, rerankers)
    assert [card.name for card in names.cards()] == ["m", "sql", "other", "judge"]
    assert [names.has(name) for name in ("other", "judge", "nobody")] == [True, True, False]
    assert [names.card(card.name) for card in names.cards()] == [*names.cards()]


def test_an_adapter_gives_its_name_and_its_versions_to_a_model_that_takes_them() -> None:
    models = (MODEL, replace(MODEL, name="sql", adapters=()))
    config = GatewayConfig(models=models, channel=ChannelConfig(secret=b""), created_s=5)
    adapters = AdapterDirectory("g", models, {"m": UNASKED, "sql": UNASKED}, None)
    names = ServedNames(config, adapters, Rerankers([], {}))
    assert [(card.name, card.parent) for card in names.cards()] == [("m", None), ("sql", None)]
    for version in ("sql@1", "sql@latest"):
        assert not names.has(version)
        assert names.card(version) is None
        with pytest.raises(RequestError, match="does not exist"):
            names.target(version)


def test_a_model_that_makes_vectors_only_says_so() -> None:
    config = GatewayConfig(models=(replace(MODEL, generates=False),), channel=ChannelConfig(secret=b""), created_s=5)
    adapters = AdapterDirectory("g", config.models, {"m": UNASKED}, None)
    assert {card.task for card in ServedNames(config, adapters, Rerankers([], {})).cards()} == {"embed"}


@pytest.mark.parametrize("name", ["nope", "sql@2", "sql@01", "m@1", ""])
def test_what_nobody_can_ask_is_not_described(names: ServedNames, name: str) -> None:
    assert names.card(name) is None
    assert not names.has(name)
    with pytest.raises(RequestError, match="does not exist"):
        names.target(name)


def test_one_name_is_found_without_a_list_of_all(names: ServedNames, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16,000 adapters, all streams of a gateway stood still for 61 ms whenever anybody asked for one model."""
    monkeypatch.setattr(names, "_list", None)
    for name in ("m", "sql", "sql@latest"):
        assert (card := names.card(name)) is not None
        assert card.name == name
    assert names.card("nope") is None


def test_a_name_is_described_as_in_the_list_whatever_its_traffic(names: ServedNames) -> None:
    refs = [AdapterRef(name="sql", path="", digest=AdapterDigest(name)) for name in "ab"]
    versions = tuple(AdapterVersion(number=number, ref=ref, created_s=number) for number, ref in enumerate(refs, 1))
    entry = AdapterEntry(name="sql", base="m", versions=versions, split=((1, 100),))
    names._adapters.adopt(Catalogue(store="s", revision=1, entries={"sql": entry}))
    assert [card for card in names.cards() if card.name == "sql"] == [names.card("sql")]
    assert (card := names.card("sql")) is not None
    assert card.created_s == 2


def test_the_list_is_made_once_for_each_change_of_the_adapters(names: ServedNames) -> None:
    before = names.cards()
    assert names.cards() is before
    names._adapters.adopt(Catalogue(store="s", revision=1, entries={}))
    assert [card.name for card in names.cards()] == ["m"]
    assert names.cards() is names.cards()


def test_the_answers_to_one_request_come_from_one_version_of_a_split_adapter(names: ServedNames) -> None:
    refs = [AdapterRef(name="sql", path="", digest=AdapterDigest(name)) for name in "ab"]
    versions = tuple(AdapterVersion(number=number, ref=ref, created_s=1) for number, ref in enumerate(refs, start=1))
    entry = AdapterEntry(name="sql", base="m", versions=versions, split=((1, 50), (2, 50)))
    names._adapters.adopt(Catalogue(store="s", revision=1, entries={"sql": entry}))
    requests = [Siblings() for _ in range(64)]
    assert {names.target("sql", siblings.draw)[1] for siblings in requests} == {*refs}
    assert len({names.target("sql", requests[0].draw)[1] for _ in range(64)}) == 1
