from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.access.tenants import key_digest
from app.http.api import create_app
from app.routes import adapters
from app.routes.adapters import AdapterInfo, AdapterList, UnloadedAdapter, _info
from deployments.answer_events import EndReason
from deployments.generation import ChatMessage, ChatPrompt
from deployments.registry.adapter_changes import AdapterStatus, Registration
from engine.errors import EngineError, FailedAloneError, OverloadError, RequestError
from tests.app.scripted_gateway import ENTRY, ScriptedGateway

KEY = {"authorization": "Bearer secret"}


@pytest.fixture
def admin(gateway: ScriptedGateway) -> httpx.AsyncClient:
    app = create_app(gateway, admin_key_sha256=key_digest("secret"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEY)


async def test_an_adapter_is_loaded_listed_routed_and_unloaded(
    admin: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = {"lora_name": "sql", "lora_path": "folder", "base_model_name": "base", "load_inplace": True}
    loaded = (await admin.post("/v1/load_lora_adapter", json=body)).json()
    AdapterInfo.model_validate(loaded)
    assert loaded["versions"][0] | {"created": 0} == {
        "version": 1, "digest": "d", "created": 0, "percent": 100, "state": "serving", "replicas": {},
    }  # fmt: skip
    assert gateway.adapters.loaded == [Registration(name="sql", place="folder", base="base", replaces=True)]
    assert (await admin.post("/v1/load_lora_adapter", json=body | {"percent": 0})).status_code == 200
    assert gateway.adapters.loaded[1].percent == 0
    listed = (await admin.get("/v1/adapters")).json()
    AdapterList.model_validate(listed)
    assert listed["data"][0]["versions"][0]["replicas"] == {"r1": "device"}
    assert (await admin.post("/v1/adapters/sql/route", json={"split": {"1": 100}})).status_code == 200
    assert gateway.adapters.routed == [("sql", {1: 100})]
    unloaded = (await admin.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "version": 1})).json()
    UnloadedAdapter.model_validate(unloaded)
    assert unloaded == {"id": "sql", "object": "adapter.unloaded", "version": 1, "freed_bytes": [5]}
    gateway.adapters.left = replace(ENTRY, versions=(replace(ENTRY.versions[0], number=2),), split=((2, 100),))
    unloaded = (await admin.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "version": 1})).json()
    UnloadedAdapter.model_validate(unloaded)
    assert [(left["version"], left["percent"]) for left in unloaded["remaining"]["versions"]] == [(2, 100)]


async def test_the_list_is_made_off_the_event_loop(admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 names with 4 versions it took half a second, in which no stream of the gateway went on."""
    threads = []

    def info(status: AdapterStatus) -> AdapterInfo:
        threads.append(threading.get_ident())
        return _info(status)

    monkeypatch.setattr(adapters, "_info", info)
    assert (await admin.get("/v1/adapters")).status_code == 200
    assert threads
    assert threading.get_ident() not in threads


async def test_an_adapter_that_does_not_fit_its_base_any_more_is_listed_with_the_reason(
    admin: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.adapters.misfits[1] = "it is wide"
    listed = (await admin.get("/v1/adapters")).json()
    AdapterList.model_validate(listed)
    version = listed["data"][0]["versions"][0]
    assert (version["state"], version["reason"], version["percent"]) == ("misfit", "it is wide", 100)


async def test_an_adapter_whose_name_a_model_has_taken_is_listed_with_the_reason(
    admin: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.adapters.misfits[1] = "it is wide"
    gateway.adapters.shadowed_by = "a base model"
    listed = (await admin.get("/v1/adapters")).json()
    AdapterList.model_validate(listed)
    version = listed["data"][0]["versions"][0]
    assert (version["state"], version["reason"]) == ("shadowed", "a base model has this name")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("GET", "/v1/adapters", None),
        ("POST", "/v1/adapters/a/route", {"split": {"1": 100}}),
    ],
)
async def test_nobody_but_an_admin_gets_through(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, gateway: ScriptedGateway, method: str, path: str, body: Any
) -> None:
    refused = await admin.request(method, path, json=body, headers={"authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    refused = await client.request(method, path, json=body, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_disabled")
    assert gateway.adapters.loaded == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "b"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b" * 5000}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "lora_pth": "c"}, "lora_pth"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "canary": {"prompt": ""}}, "canary.prompt"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b", "percent": 101}, "percent"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "b", "canary": {"prompt": "a", "max_tokens": 0}},
            "canary.max_tokens",
        ),
        ("/v1/unload_lora_adapter", {"lora_name": "a", "version": 0}, "version"),
        ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 3}, "lora_int_id"),
        ("/v1/adapters/a/route", {"split": {}}, "split"),
        ("/v1/adapters/a/route", {"split": {"1": 100, "01": 100}}, "split.01"),
        ("/v1/adapters/a/route", {"split": {"1": -1}}, "split.1"),
        ("/v1/adapters/a/route", {"split": {"one": 100}}, "split.one"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_field(
    admin: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    refused = await admin.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_what_the_registry_refuses_is_told(admin: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.adapters.error = RequestError("adapter 'a': no.", field="lora_name")
    refused = await admin.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")


async def test_a_canary_is_asked_before_the_adapter_is_served(
    admin: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    body = {"lora_name": "sql", "lora_path": "b", "canary": {"prompt": "Who?", "max_tokens": 3, "expect": "Hello"}}
    assert (await admin.post("/v1/load_lora_adapter", json=body)).status_code == 200
    (asked,) = gateway.requests
    assert (asked.prompt, asked.max_tokens) == (ChatPrompt(messages=(ChatMessage(role="user", content="Who?"),)), 3)
    assert asked.params.temperature == 0
    assert len(gateway.adapters.loaded) == 1


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ({"pieces": ["Nobody"]}, 400, "it is 'Nobody'"),
        ({"error_before": RequestError("No.", field="messages")}, 400, "No."),
        ({"error_after": EngineError("NaN")}, 400, "It was not answered."),
        ({"error_after": FailedAloneError("It takes 7 bytes.")}, 400, "It takes 7 bytes."),
        ({"error_before": TimeoutError()}, 400, "It was not answered."),
        ({"end": EndReason.CONTENT_FILTER}, 400, "safety classifier"),
        ({"error_before": OverloadError("Full.", retry_after_s=1.0)}, 503, "Full."),
    ],
)
async def test_an_adapter_that_fails_its_canary_is_not_served(
    admin: httpx.AsyncClient, gateway: ScriptedGateway, script: dict[str, Any], status: int, words: str
) -> None:
    for name, value in script.items():
        setattr(gateway, name, value)
    body = {"lora_name": "sql", "lora_path": "b", "canary": {"prompt": "Who?", "expect": "Hello"}}
    refused = await admin.post("/v1/load_lora_adapter", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, "canary" if status == 400 else None)
    assert words in refused.json()["error"]["message"]
    assert gateway.adapters.loaded == []
