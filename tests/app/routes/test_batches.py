"""Batches from their upload to their output files, each line through the whole application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, key_digest
from app.routes.batches import BatchList, BatchObject
from deployments.gateway.inside import BATCH_PRIORITY
from tests.app.batch_gateway import BatchGateway, serve
from tests.contract.published import ANSWERS, check

CHAT = "/v1/chat/completions"
RING = KeyRing(
    tenant_by_name={
        "blue": Tenant(name="blue", models=frozenset({"base"}), priority=3),
        "red": Tenant(name="red", models=frozenset({"shout"})),
    },
    name_by_digest={key_digest("b"): "blue", key_digest("r"): "red"},
)
BLUE, RED = {"x-api-key": "b"}, {"x-api-key": "r"}

Served = tuple[BatchGateway, httpx.AsyncClient]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    gateway, client = await serve(tmp_path, RING, max_unfinished=1, max_lines=3)
    async with client:
        yield gateway, client


def line(custom_id: str, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "base"} | asked | body}


async def upload(http: httpx.AsyncClient, *lines: Any, headers: dict[str, str] = BLUE) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("in.jsonl", content)}
    return str((await http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)).json()["id"])


async def make(http: httpx.AsyncClient, *lines: Any, headers: dict[str, str] = BLUE, **fields: Any) -> httpx.Response:
    body = {
        "input_file_id": await upload(http, *lines, headers=headers),
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    return await http.post("/v1/batches", json=body | fields, headers=headers)


async def lines_of(http: httpx.AsyncClient, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = (await http.get(f"/v1/files/{file_id}/content", headers=BLUE)).text
    return {found["custom_id"]: found for found in map(json.loads, content.splitlines())}


async def test_lines_are_answered_as_if_their_tenant_had_asked(served: Served) -> None:
    gateway, http = served
    made = BatchObject.model_validate(
        (await make(http, line("a"), line("b", priority=-(2**31)), line("c", n=0), metadata={"k": "v"})).json()
    )
    assert (made.status, made.metadata, made.request_counts.total) == ("validating", {"k": "v"}, 0)
    await gateway.ended("blue", made.id)
    batch = BatchObject.model_validate((await http.get(f"/v1/batches/{made.id}", headers=BLUE)).json())
    assert (batch.status, batch.model, batch.errors) == ("completed", "base", None)
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.completed_at is not None
    good, bad = await lines_of(http, batch.output_file_id), await lines_of(http, batch.error_file_id)
    assert set(good) == {"a", "b"}
    assert good["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello 🙂"
    assert good["a"]["response"]["status_code"] == 200
    assert (bad["c"]["response"]["status_code"], bad["c"]["response"]["body"]["error"]["param"]) == (400, "n")
    # Behind every other request, whatever the line says, and as the tenant.
    assert {request.tenant for request in gateway.requests} == {"blue"}
    assert sorted(request.priority for request in gateway.requests) == [BATCH_PRIORITY + 3 - 2**31, BATCH_PRIORITY + 3]
    assert min(request.priority for request in gateway.requests) > 2**32
    assert all(request.timeout_s for request in gateway.requests)
    output = (await http.get(f"/v1/files/{batch.output_file_id}", headers=BLUE)).json()
    assert output["purpose"] == "batch_output"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_every_endpoint_is_answered_in_its_shape(served: Served, url: str, body: dict[str, Any]) -> None:
    gateway, http = served
    made = (await make(http, line("a", url=url, **body), endpoint=url)).json()
    await gateway.ended("blue", made["id"])
    batch = (await http.get(f"/v1/batches/{made['id']}", headers=BLUE)).json()
    answered = (await lines_of(http, batch["output_file_id"]))["a"]
    check(ANSWERS[f"POST {url}"][0], answered["response"]["body"])


async def test_an_input_that_is_wrong_is_told_line_by_line(served: Served) -> None:
    gateway, http = served
    made = (await make(http, line("a"), line("a"), line("b", url="/v1/completions"))).json()
    await gateway.ended("blue", made["id"])
    batch = BatchObject.model_validate((await http.get(f"/v1/batches/{made['id']}", headers=BLUE)).json())
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data] == [(2, "duplicate_custom_id"), (3, "invalid_url")]
    assert gateway.requests == []


async def test_a_model_that_the_tenant_may_not_use_does_not_exist(served: Served) -> None:
    gateway, http = served
    made = (await make(http, line("a"), headers=RED)).json()
    batch = await gateway.ended("red", made["id"])
    assert [error.code for error in batch.errors] == ["model_not_found"]


async def test_batches_are_their_tenant_s_listed_and_bounded(served: Served) -> None:
    gateway, http = served
    gateway.never_ends = True
    first = (await make(http, line("a"))).json()
    second = await make(http, line("a"))
    assert (second.status_code, second.json()["error"]["code"]) == (429, "batch_limit_exceeded")
    in_use = await http.delete(f"/v1/files/{first['input_file_id']}", headers=BLUE)
    assert (in_use.status_code, in_use.json()["error"]["code"]) == (400, "file_in_use")
    for method, path in (("GET", ""), ("POST", "/cancel")):
        response = await http.request(method, f"/v1/batches/{first['id']}{path}", headers=RED)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "batch_not_found")
    assert (await http.get("/v1/batches", headers=RED)).json()["data"] == []
    cancelled = (await http.post(f"/v1/batches/{first['id']}/cancel", headers=BLUE)).json()
    assert cancelled["status"] == "cancelling"
    await gateway.ended("blue", first["id"])
    assert gateway.num_open == 0
    gateway.never_ends = False
    second_id = (await make(http, line("a"))).json()["id"]
    page = BatchList.model_validate((await http.get("/v1/batches?limit=1", headers=BLUE)).json())
    assert ([batch.id for batch in page.data], page.has_more) == ([second_id], True)
    page = BatchList.model_validate((await http.get(f"/v1/batches?after={second_id}", headers=BLUE)).json())
    assert [(batch.id, batch.status) for batch in page.data] == [(first["id"], "cancelled")]
    await gateway.ended("blue", second_id)
    late = await http.post(f"/v1/batches/{second_id}/cancel", headers=BLUE)
    assert (late.status_code, late.json()["error"]["code"]) == (400, "batch_not_cancellable")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"x": 1}, 400, "x"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], status: int, param: str) -> None:
    _, http = served
    response = await make(http, line("a"), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_an_output_is_no_input(served: Served) -> None:
    gateway, http = served
    made = (await make(http, line("a"))).json()
    output_id = (await gateway.ended("blue", made["id"])).output_file_id
    response = await make(http, line("a"), input_file_id=output_id)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input_file_id")
