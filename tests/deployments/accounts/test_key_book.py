from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.accounts import key_book
from deployments.accounts.key_book import KeyBook
from deployments.accounts.meter import Meter
from deployments.accounts.values import KeyChanges, KeyInfo

DIGESTS = st.sampled_from("abcd")


def a_key(digest: str, tenant: str) -> KeyInfo:
    return KeyInfo(digest=digest, tenant=tenant, created_unix_s=0.0)


def a_follower() -> Meter:
    """A meter that only follows the keys."""
    meter = object.__new__(Meter)
    meter.tenant_by_key, meter._keys_version = None, ""
    return meter


def test_changes_are_told_alone_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_book, "MAX_CHANGES", 3)
    book = KeyBook([a_key("a", "x")])
    first = book.since("")
    assert first is not None
    book.drop("unknown")
    assert book.since(first.version) is None
    for digest, is_whole in (("b", False), ("c", False), ("d", False), ("e", True)):
        book.put(a_key(digest, "x"))
        changes = book.since(first.version)
        assert changes is not None
        assert changes.is_whole == is_whole


@given(st.lists(st.tuples(st.sampled_from(["put", "drop", "ask", "hear", "restart"]), DIGESTS, st.sampled_from("xy"))))
def test_who_asks_knows_all_keys_whatever_was_late(deeds: list[tuple[str, str, str]]) -> None:
    """Answers overtake one another: those to a change of the gateway's own, and those to its reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_book, "MAX_CHANGES", 3)
        book, follower = KeyBook([a_key("a", "x")]), a_follower()
        late: list[KeyChanges | None] = []
        for deed, digest, tenant in deeds:
            match deed:
                case "put":
                    book.put(a_key(digest, tenant))
                case "drop":
                    book.drop(digest)
                case "ask":
                    late.append(book.since(follower._keys_version))
                case "hear" if late:
                    follower._take_keys(late.pop())
                case "restart":
                    book = KeyBook(book.all_keys())
        follower._take_keys(book.since(follower._keys_version))
        assert follower.tenant_by_key == {key.digest: key.tenant for key in book.all_keys()}
        assert book.since(follower._keys_version) is None
