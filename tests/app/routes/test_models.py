from __future__ import annotations

import threading
from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI

from deployments.generation import ModelCard
from tests.app.scripted_gateway import ScriptedGateway


async def test_bases_and_adapters_are_listed_with_their_parent(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert [(model["id"], model["object"], model["parent"], model["task"]) for model in listing["data"]] == [
        ("base", "model", None, "generate"),
        ("shout", "model", "base", "generate"),
    ]


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
async def test_a_list_is_made_beside_the_event_loop(
    client: httpx.AsyncClient, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """With 16,000 adapters, all streams of a gateway stood still for 271 ms."""
    threads: list[int] = []
    models = gateway.models

    def seen() -> Sequence[ModelCard]:
        threads.append(threading.get_ident())
        return models()

    monkeypatch.setattr(gateway, "models", seen)
    assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_one_model_is_found_by_its_name(client: httpx.AsyncClient) -> None:
    model = (await client.get("/v1/models/shout")).json()
    assert (model["id"], model["created"], model["max_model_len"]) == ("shout", 1700000001, 512)


async def test_names_that_do_not_exist_are_a_404_whatever_they_hold(client: httpx.AsyncClient) -> None:
    for name in ("nope", "org/model", "..%2f..%2fetc%2fpasswd", "%ff%fe", "%00", "a" * 5000, "0x7f001234"):
        response = await client.get(f"/v1/models/{name}")
        assert response.status_code == 404, name
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(response.text) < 500


async def test_anthropic_s_clients_read_models_in_their_own_shape(client: httpx.AsyncClient) -> None:
    theirs = {"anthropic-version": "2023-06-01"}
    page = (await client.get("/v1/models", headers=theirs)).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("base", "shout", False)
    model = (await client.get("/v1/models/shout", headers=theirs)).json()
    assert page["data"][1] == model
    assert model == {
        "type": "model",
        "id": "shout",
        "display_name": "shout",
        "created_at": "2023-11-14T22:13:21Z",
        "lifecycle": "active",
        "max_input_tokens": 512,
        "max_tokens": 512,
        **dict.fromkeys(("capabilities", "deprecated_at", "line", "retires_at")),
    }
    missing = await client.get("/v1/models/nope", headers=theirs)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


async def test_under_a_route_prefix_too_anthropic_s_clients_read_their_own_shape(app: FastAPI) -> None:
    """As Serve calls it under `route_prefix: /llm`: with the whole path, and the prefix as `root_path`."""
    transport = httpx.ASGITransport(app=app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test/llm") as client:
        models = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert models.json()["first_id"] == "base"
        refused = await client.post("/v1/messages", json={"model": "base"})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
