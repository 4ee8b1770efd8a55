from __future__ import annotations

import httpx


async def test_bases_and_adapters_are_listed_with_their_parent(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert [(model["id"], model["object"], model["parent"], model["task"]) for model in listing["data"]] == [
        ("base", "model", None, "generate"),
        ("shout", "model", "base", "generate"),
    ]


async def test_one_model_is_found_by_its_name(client: httpx.AsyncClient) -> None:
    model = (await client.get("/v1/models/shout")).json()
    assert (model["id"], model["created"], model["max_model_len"]) == ("shout", 1700000001, 512)


async def test_names_that_do_not_exist_are_a_404_whatever_they_hold(client: httpx.AsyncClient) -> None:
    for name in ("nope", "org/model", "..%2f..%2fetc%2fpasswd", "%ff%fe", "%00", "a" * 5000, "0x7f001234"):
        response = await client.get(f"/v1/models/{name}")
        assert response.status_code == 404, name
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(response.text) < 500
