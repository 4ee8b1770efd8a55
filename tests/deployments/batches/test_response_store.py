from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.batches import response_store
from deployments.batches.response_store import ResponseStore
from deployments.batches.store import BatchStore
from deployments.batches.values import KeptResponse
from engine.errors import RequestError
from tests.deployments.batches.batch_world import config

NOW_S = 1_700_000_000


@pytest.fixture
def now_s() -> list[int]:
    return [NOW_S]


@pytest.fixture
def opened(tmp_path: Path, now_s: list[int]) -> Iterator[BatchStore]:
    store = BatchStore(config(tmp_path, max_response_bytes=100), clock=lambda: now_s[0])
    yield store
    store.close()


@pytest.fixture
def store(opened: BatchStore) -> ResponseStore:
    return opened.responses


def response(name: str, after: str | None = None, *, tenant: str = "blue", created_s: int = NOW_S) -> KeptResponse:
    return KeptResponse(
        response_id=name, tenant=tenant, previous_id=after, created_s=created_s, input_items=b"[1]" * 2, body=b"{}" * 2
    )


def code(call: Any, *args: Any) -> str | None:
    with pytest.raises(RequestError) as refused:
        call(*args)
    return refused.value.code


def test_a_conversation_is_a_response_and_what_it_continues(store: ResponseStore) -> None:
    first, second, other = response("a"), response("b", "a"), response("c", "a")
    for one in (first, second, other, second):
        store.keep(one)
    assert store.conversation("blue", "b") == [first, second]
    assert store.conversation("blue", "c") == [first, other]
    assert store.one("blue", "b") == second
    assert store.several("blue", ["c", "a", "none"]) == [first, other]


def test_a_tenant_s_are_its_own(store: ResponseStore) -> None:
    store.keep(response("a"))
    assert code(store.one, "red", "a") == code(store.forget, "red", "a") == "response_not_found"
    assert code(store.conversation, "red", "a") == "previous_response_not_found"
    assert store.several("red", ["a"]) == []
    store.keep(response("b", "a", tenant="red"))
    assert code(store.conversation, "red", "b") == "previous_response_not_found"


def test_what_is_deleted_or_expired_is_gone(opened: BatchStore, now_s: list[int]) -> None:
    store = opened.responses
    for one in (response("a"), response("b", "a", created_s=NOW_S + 10), response("c", created_s=NOW_S + 10)):
        store.keep(one)
    store.forget("blue", "c")
    assert code(store.one, "blue", "c") == code(store.forget, "blue", "c") == "response_not_found"
    now_s[0] += 3600
    assert code(store.one, "blue", "a") == "response_not_found"
    with pytest.raises(RequestError, match="A response that 'b' continues was deleted, or has expired"):
        store.conversation("blue", "b")
    assert store.one("blue", "b").previous_id == "a"
    opened.drop_expired()
    now_s[0] -= 3600
    assert code(store.one, "blue", "a") == "response_not_found"
    assert store.one("blue", "b")


def test_a_tenant_s_oldest_make_room_for_new_ones(store: ResponseStore) -> None:
    names = [f"r{number}" for number in range(25)]
    store.keep(response("other", tenant="red"))
    for name in names:
        store.keep(response(name))
    # Ten bytes each, of a hundred.
    assert [one.response_id for one in store.several("blue", names)] == names[-10:]
    assert store.several("red", ["other"])
    store.forget("blue", "r24")
    store.keep(response("new"))
    assert len(store.several("blue", [*names, "new"])) == 10


def test_what_has_expired_takes_no_room(opened: BatchStore, now_s: list[int]) -> None:
    for name in (f"r{number}" for number in range(10)):
        opened.responses.keep(response(name))
    now_s[0] += 3600
    opened.drop_expired()
    names = [f"n{number}" for number in range(10)]
    for name in names:
        opened.responses.keep(response(name, created_s=now_s[0]))
    assert [one.response_id for one in opened.responses.several("blue", names)] == names


def test_what_is_kept_outlives_the_process(tmp_path: Path, now_s: list[int]) -> None:
    for name in ("a", "b"):
        opened = BatchStore(config(tmp_path, max_response_bytes=15), clock=lambda: now_s[0])
        opened.responses.keep(response(name))
        assert [one.response_id for one in opened.responses.several("blue", ["a", "b"])] == [name]
        opened.close()


@pytest.mark.parametrize(("bound", "value"), [("MAX_READ_BYTES", 20), ("MAX_CONVERSATION", 2)])
def test_a_request_reads_no_more_than_any_context_holds(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(response_store, bound, value)
    names = [f"r{number}" for number in range(3)]
    for name, previous in zip(names, (None, *names), strict=False):
        store.keep(response(name, previous))
    assert len(store.conversation("blue", "r1")) == len(store.several("blue", names[:2])) == 2
    assert code(store.conversation, "blue", "r2") == "context_length_exceeded"
    assert code(store.several, "blue", names) == "context_length_exceeded"
