"""What a new configuration leaves to the other versions of an adapter that it does not name any more."""

from __future__ import annotations

import shutil

import pytest

from adapters.registry import reference
from tests.deployments.registry.place import Place, a_declared, contents, wanted


@pytest.mark.parametrize("percent", [0, 10], ids=["none", "some"])
async def test_a_lost_version_leaves_its_traffic_to_those_that_have_some_and_never_silently(
    place: Place, caplog: pytest.LogCaptureFixture, percent: int
) -> None:
    """The next deployment gave it to a version that had been rolled back from, and no log told of it."""
    registry, _ = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("a", "b", replaces=True))
    await registry.route("a", {1: 100 - percent, 2: percent})
    shutil.rmtree(place.dropin / "a")
    registry = place.open()
    await registry.declare({"m": []}, "2")
    shares = [(number, share) for number, _, share in contents(registry)]
    assert shares == ([(2, 100)] if percent else [(1, 100), (2, 0)])
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"version 1 of the adapter 'a', read from {place.dropin / 'a'}, is not in the configuration" in line
    assert ("its traffic goes to version 2 (100%)" if percent else "no other version has traffic") in line
    if not percent:
        await registry.unregister("a", 1)
        assert [(number, share) for number, _, share in contents(registry)] == [(2, 100)]


async def test_a_lost_version_goes_once_it_has_no_traffic_or_its_successor_is_there(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    registry, _ = await a_declared(place)
    place.put("b", seed=2)
    await registry.register(wanted("a", "b", replaces=True))
    await registry.route("a", {1: 100})
    place.put("a", seed=3)
    refs = [reference("a", str(place.dropin / "a"))]
    registry = place.open()
    await registry.declare({"m": refs}, "2")
    assert [(number, share) for number, _, share in contents(registry)] == [(2, 0), (3, 100)]
    assert "it had no traffic any more" in caplog.text
    caplog.clear()
    await registry.route("a", {2: 100})
    await registry.declare({"m": []}, "3")
    assert [(number, share) for number, _, share in contents(registry)] == [(2, 100)]
    assert caplog.text == ""
