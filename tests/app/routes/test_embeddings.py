from __future__ import annotations

import base64
import threading
from array import array

import httpx
import orjson
import pytest

from app.access.tenants import Tenant, TenantGateway
from deployments.accounts.values import Charge, TenantLimits
from deployments.generation import TextPrompt, TokenPrompt
from deployments.pooled import EmbeddingRequest
from deployments.timeline import Reception
from engine.errors import RequestError
from engine.request import Pooling
from tests.app.routes.pooled_fields import WRONG_FIELDS
from tests.app.scripted_gateway import ScriptedGateway, ScriptedMeter

PATH = "/v1/embeddings"


async def test_the_answer_is_openais(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await client.post(PATH, json={"model": "base", "input": ["a", "b"], "user": "u", "priority": 0})
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, 0.0]},
            {"object": "embedding", "index": 1, "embedding": [0.5, 1.0]},
        ],
        "model": "base",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }
    (request,) = gateway.embedded
    assert (request.pooling, request.dimensions, request.normalizes) == (None, None, True)
    assert request.request_id.startswith(f"{response.headers['request-id']}.")


async def test_many_vectors_are_written_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2,048 vectors of 4,096 numbers, all streams of a gateway stood still for more than a second."""
    threads: list[int] = []

    def seen(value: object, option: int = 0) -> bytes:
        threads.append(threading.get_ident())
        return dumps(value, option=option)

    dumps = orjson.dumps
    monkeypatch.setattr(orjson, "dumps", seen)
    answer = await client.post(PATH, json={"model": "base", "input": ["a", "b"]})
    assert [entry["embedding"] for entry in answer.json()["data"]] == [[0.5, 0.0], [0.5, 1.0]]
    assert len(threads) == 3, "each vector, and the answer"
    assert threading.get_ident() not in threads


async def test_inputs_are_counted_before_any_prompt_is_made(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.translation.prompts.TextPrompt", None)
    for path, field in ((PATH, "input"), ("/v1/completions", "prompt")):
        refused = await client.post(path, json={"model": "base", field: [""] * 2049})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert "2049 were given" in refused.json()["error"]["message"]


async def test_base64_is_of_little_endian_float32(client: httpx.AsyncClient) -> None:
    answer = (await client.post(PATH, json={"model": "base", "input": "a", "encoding_format": "base64"})).json()
    assert array("f", base64.b64decode(answer["data"][0]["embedding"])).tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", (TextPrompt(text="a"),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2], (TokenPrompt(token_ids=(1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3)))),
    ],
)
async def test_each_shape_of_input_and_every_field_reach_the_gateway(
    client: httpx.AsyncClient, gateway: ScriptedGateway, given: object, inputs: object
) -> None:
    body = {"model": "shout", "input": given, "dimensions": 1, "pooling": "mean", "normalize": False}
    headers = {"x-request-timeout": "2.5"}
    assert (await client.post(PATH, json=body, headers=headers)).status_code == 200
    (request,) = gateway.embedded
    assert request.inputs == inputs
    assert (request.model, request.pooling, request.dimensions) == ("shout", Pooling.MEAN, 1)
    assert (request.normalizes, request.timeout_s) == (False, 2.5)


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        *WRONG_FIELDS,
        ({"dimensions": 0}, "dimensions", 400),
        ({"encoding_format": "int8"}, "encoding_format", 400),
        ({"pooling": "cls"}, "pooling", 400),
    ],
)
async def test_wrong_bodies_name_their_field(
    client: httpx.AsyncClient, change: dict[str, object], param: str, status: int
) -> None:
    response = await client.post(PATH, json={"model": "base", "input": "a"} | change)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_a_tenant_pays_for_the_tokens_and_sees_its_own_models_only(gateway: ScriptedGateway) -> None:
    meter, limits = ScriptedMeter(), TenantLimits(requests_per_minute=10)
    blue = Tenant(name="blue", models=frozenset({"base"}), priority=-1, limits=limits)
    own = TenantGateway(gateway, meter, blue, {}, Reception())
    asked = EmbeddingRequest(request_id="r", model="base", inputs=(TextPrompt(text="x" * 40),))
    await own.embed(asked)
    assert meter.admitted == [("blue", 11)]
    assert meter.charges == [Charge("blue", limits, 0, 0)]
    (seen,) = gateway.embedded
    assert (seen.tenant, seen.salt, seen.priority) == ("blue", "blue\n", -1)
    with pytest.raises(RequestError, match="does not exist"):
        await own.embed(EmbeddingRequest(request_id="r", model="shout", inputs=()))
