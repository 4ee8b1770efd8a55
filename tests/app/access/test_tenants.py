"""Whose key opens what, and what a tenant's requests carry."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from app.access.tenants import KeyRing, Tenant, TenantGateway, check_admin, given_key, key_digest
from app.http.api import _RESOURCES, create_app
from app.http.body_threads import BodyThreads
from app.http.errors import ApiError
from app.routes.context import GUARDS
from deployments.accounts.actor import Accounts
from deployments.accounts.values import Admission, Charge, Quota, TenantLimits
from deployments.answer_events import TextDelta
from deployments.batches.values import InsideCall
from deployments.config import AccountsConfig
from deployments.errors import UnavailableError
from deployments.gateway.inside import answer_inside
from deployments.generation import GenerationRequest, TextPrompt
from deployments.pooled import EmbeddingRequest
from deployments.timeline import Reception
from engine.errors import RequestError
from engine.request import SamplingParams
from tests.app.scripted_gateway import ScriptedGateway, ScriptedMeter
from tests.deployments.accounts.test_meter import LocalHandle, a_meter

ALL, SOME = Tenant(name="all", priority=3), Tenant(name="some", models=frozenset({"shout"}))
FEW = Tenant(name="few", limits=TenantLimits(concurrent_requests=2))
CHAT: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}
MESSAGE = CHAT | {"max_tokens": 5}


@pytest.fixture
def guarded(gateway: ScriptedGateway) -> httpx.AsyncClient:
    ring = KeyRing(
        tenant_by_name={tenant.name: tenant for tenant in (ALL, SOME, FEW)},
        name_by_digest={
            key_digest(key): name
            for key, name in (("key-a", "all"), ("key-b", "all"), ("key-c", "some"), ("key-d", "few"))
        },
    )
    app = create_app(gateway, key_ring=ring, admin_key_sha256=key_digest("admin"))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Basic k"}, None),
        ({"authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_a_key_comes_as_openai_or_as_anthropic_sends_it(headers: dict[str, str], key: str | None) -> None:
    assert given_key(Headers(headers)) == key


def test_a_key_that_may_be_one_of_those_made_later_is_not_called_wrong_before_they_are_known() -> None:
    ring = KeyRing(tenant_by_name={"all": ALL}, name_by_digest={key_digest("k"): "all"})
    assert ring.identify(Headers(bearer("k")), None) is ALL
    assert ring.identify(Headers(bearer("later")), {key_digest("later"): "all"}) is ALL
    with pytest.raises(UnavailableError):
        ring.identify(Headers(bearer("later")), None)
    for headers, made_later in ((bearer("later"), {}), ({}, None)):
        with pytest.raises(ApiError) as refused:
            ring.identify(Headers(headers), made_later)
        assert refused.value.status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(key_digest("key-a")),
        {"x-api-key": "key-a2"},
        {"x-api-key": "café\xff".encode("latin-1")},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/moderations"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/base"),
    ],
)
async def test_without_a_key_nothing_is_answered_and_nothing_computed(
    guarded: httpx.AsyncClient, gateway: ScriptedGateway, headers: Any, method: str, path: str
) -> None:
    body = {"model": "base", "messages": CHAT["messages"], "prompt": "a", "input": "a", "tokens": [1]}
    fields = {"/v1/chat/completions": ("model", "messages"), "/v1/completions": ("model", "prompt")}
    fields |= {"/v1/responses": ("model", "input"), "/v1/moderations": ("input",)}
    fields |= {"/tokenize": ("model", "prompt"), "/detokenize": ("model", "tokens")}
    sent = {name: body[name] for name in fields.get(path, ())} or None
    refused = await guarded.request(method, path, json=sent, headers=headers)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert gateway.requests == []


async def test_messages_says_so_in_anthropic_s_shape_and_takes_its_header(guarded: httpx.AsyncClient) -> None:
    refused = await guarded.post("/v1/messages", json=MESSAGE)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (await guarded.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "key-a"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", bearer("wrong")),
        ("/v1/files", bearer("admin")),
        ("/v1/load_lora_adapter", bearer("key-a")),
    ],
)
async def test_the_body_of_whoever_has_no_key_is_not_read(
    guarded: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(9):
            num_read += 1
            yield b"["

    refused = await guarded.post(path, content=body(), headers=headers | {"content-type": "application/json"})
    assert (refused.status_code, refused.headers["www-authenticate"], num_read) == (401, "Bearer", 0)


def test_every_route_but_the_operators_checks_the_key_before_it_reads_the_body() -> None:
    routes = [route for resource in _RESOURCES for route in resource.router.routes]
    unguarded = [
        route.path for route in routes if GUARDS.isdisjoint(each.call for each in route.dependant.dependencies)
    ]
    assert unguarded == ["/health", "/ping", "/metrics", "/", "/page/{name}"]


async def test_a_tenant_s_requests_carry_its_name_its_salt_and_its_priority(
    guarded: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    for key in ("key-a", "key-b"):
        body = CHAT | {"cache_salt": "x", "priority": 2}
        assert (await guarded.post("/v1/chat/completions", json=body, headers=bearer(key))).status_code == 200
    first, second = gateway.requests
    assert (first.tenant, first.salt, first.priority) == ("all", "all\nx", 5)
    assert (second.tenant, second.salt) == (first.tenant, first.salt)


async def test_large_bodies_are_read_where_tenants_take_turns(
    guarded: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read first come first served, before any limit of a tenant."""
    flows = list[object]()

    async def noted(threads: BodyThreads, flow: object, work: Any) -> Any:
        flows.append(flow)
        return work()

    monkeypatch.setattr(BodyThreads, "run", noted)
    for key, text in (("key-a", "Hi"), ("key-b", "x" * 70_000), ("key-d", "x" * 70_000)):
        body = {"model": "base", "messages": [{"role": "user", "content": text}]}
        await guarded.post("/v1/chat/completions", json=body, headers=bearer(key))
    body = CHAT | {"structured_outputs": {"choice": ["a", "b"]}}
    await guarded.post("/v1/chat/completions", json=body, headers=bearer("key-a"))
    assert flows == ["all", "all", "few", "few", ("all", "small")]


async def test_models_of_others_do_not_exist(guarded: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    some = bearer("key-c")
    listed = (await guarded.get("/v1/models", headers=some)).json()["data"]
    assert [model["id"] for model in listed] == ["shout"]
    assert (await guarded.get("/v1/models/base", headers=some)).status_code == 404
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "base", "prompt": "a"}),
        ("/v1/responses", {"model": "base", "input": "a"}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"model": "base", "prompt": "a"}),
        ("/detokenize", {"model": "base", "tokens": [1]}),
    ):
        assert (await guarded.post(path, json=body, headers=some)).status_code == 404, path
    assert gateway.requests == []
    assert (await guarded.post("/v1/chat/completions", json=CHAT | {"model": "shout"}, headers=some)).status_code == 200
    assert SOME.may_use("shout@3")
    assert not SOME.may_use("shout-3")


@pytest.mark.parametrize(
    ("path", "asked", "field"),
    [
        ("/v1/chat/completions", CHAT | {"n": 3}, "n"),
        ("/v1/completions", {"model": "base", "prompt": "a", "n": 3}, "n"),
        ("/v1/completions", {"model": "base", "prompt": ["a", "b", "c"]}, "prompt"),
    ],
)
async def test_more_answers_than_may_ever_be_under_way_are_refused_before_any_is_counted(
    guarded: httpx.AsyncClient, gateway: ScriptedGateway, path: str, asked: dict[str, Any], field: str
) -> None:
    refused = await guarded.post(path, json=asked, headers=bearer("key-d"))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, field)
    assert "3 answers are more than the limit of 2 requests at once" in error["message"]
    assert gateway.requests == []


async def test_a_tenant_s_moderations_are_its_own_and_count_towards_its_limits(gateway: ScriptedGateway) -> None:
    meter = ScriptedMeter()
    own = TenantGateway(gateway, meter, FEW, {}, Reception())
    await own.moderate(["x" * 20, "y" * 20], tenant="all")
    assert gateway.moderated_for == ["few"]
    assert (meter.admitted, meter.charges) == ([("few", 11)], [Charge("few", FEW.limits, 0, 0)])
    meter.admission = Admission(refused_by="concurrent_requests", retry_after_s=1.0)
    with pytest.raises(ApiError) as refused:
        await own.moderate(["x"])
    assert (refused.value.status, gateway.moderated_for) == (429, ["few"])


async def test_what_comes_before_an_answer_is_recorded_with_it(
    guarded: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.meter = ScriptedMeter()
    body = {"model": "base", "prompt": "a", "n": 2}
    assert (await guarded.post("/v1/completions", json=body, headers=bearer("key-d"))).status_code == 200
    for request in gateway.requests:
        stages = request.reception.stage_by_name.values()
        assert [stage.name for stage in stages] == ["parse", "auth", "limits"]
        assert all(a.end_s <= b.start_s for a, b in pairwise(stages))
        assert 0 < [*stages][-1].end_s <= request.reception.now_s


async def test_lines_of_batches_have_limits_of_their_own(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """A batch used up its tenant's requests of each minute, and the tenant itself was refused."""
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    gateway.meter = a_meter(LocalHandle(Accounts(config)), tmp_path)  # type: ignore[assignment]
    tenant = Tenant(name="blue", limits=TenantLimits(requests_per_minute=1))
    app = create_app(
        gateway, key_ring=KeyRing(tenant_by_name={"blue": tenant}, name_by_digest={key_digest("key-b"): "blue"})
    )
    body = {"model": "base", "prompt": "a"}
    line = InsideCall(
        tenant="blue", method="POST", path="/v1/completions", request_id="r", body=json.dumps(body).encode()
    )
    assert [(await answer_inside(app, line)).status for _ in range(2)] == [200, 429]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        own = [await client.post("/v1/completions", json=body, headers=bearer("key-b")) for _ in range(2)]
    assert [answer.status_code for answer in own] == [200, 429]
    assert [request.tenant for request in gateway.requests] == ["blue", "blue"]


async def test_of_an_answer_that_its_client_leaves_what_was_written_counts(gateway: ScriptedGateway) -> None:
    meter = ScriptedMeter()
    gateway.deltas = [TextDelta(text="a", num_tokens=3), TextDelta(text="b", num_tokens=5)]
    own = TenantGateway(gateway, meter, FEW, {}, Reception())
    request = GenerationRequest(
        request_id="r", model="base", prompt=TextPrompt(text="x"), params=SamplingParams(max_tokens=9)
    )
    async with aclosing(own.generate(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.text == "b":
                break
    assert [charge.output_tokens for charge in meter.charges] == [5]


async def test_a_page_that_loads_from_elsewhere_is_not_served(guarded: httpx.AsyncClient) -> None:
    for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
        assert (await guarded.get(path, headers=bearer("key-a"))).status_code == 404


async def test_operators_need_no_tenant_s_key(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.get("/health")).status_code == 200
    assert (await guarded.get("/metrics")).status_code == 200
    assert (await guarded.get("/v1/adapters", headers=bearer("admin"))).status_code == 200
    assert (await guarded.get("/v1/adapters", headers=bearer("key-a"))).status_code == 401


DIGEST = key_digest("secret")


@pytest.mark.parametrize("value", ["Bearer secret", "bearer  secret "])
def test_the_key_opens(value: str) -> None:
    check_admin(Headers({"authorization": value}), DIGEST)


@pytest.mark.parametrize(
    ("headers", "digest", "status", "words"),
    [
        ({}, DIGEST, 401, "needs the admin key, as"),
        ({"authorization": "Bearer "}, DIGEST, 401, "needs the admin key, as"),
        ({"authorization": "Bearer wrong"}, DIGEST, 401, "needs the admin key, which this is not;"),
        ({"authorization": "Basic secret"}, DIGEST, 401, "needs the admin key, as"),
        ({"authorization": f"Bearer {DIGEST}"}, DIGEST, 401, "needs the admin key, which this is not;"),
        ({"authorization": "Bearer secret"}, None, 403, "ANTIPHON_ADMIN_KEY"),
        ({}, key_digest(""), 401, "needs the admin key, as"),
    ],
)
def test_nothing_else_does(headers: dict[str, str], digest: str | None, status: int, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_admin(Headers(headers), digest)
    assert refused.value.status == status
    assert words in refused.value.message


@pytest.mark.parametrize(("window_s", "left"), [(3600.0, -101), (0.0, 0)])
async def test_a_refused_prompt_is_not_counted(gateway: ScriptedGateway, window_s: float, left: int) -> None:
    """If its window has ended, it is not counted anyway: the next one had room for more than the limit."""
    meter = ScriptedMeter()
    meter.admission = Admission(quotas={"input_tokens_per_minute": Quota(200, 99, window_s)})
    own = TenantGateway(gateway, meter, FEW, {}, Reception())
    request = EmbeddingRequest(request_id="e", model="nobody", inputs=(TextPrompt(text="x" * 400),))
    with pytest.raises(RequestError):
        await own.embed(request)
    assert (meter.admitted, meter.charges) == ([("few", 101)], [Charge("few", FEW.limits, left, 0)])


async def test_a_prompt_that_admission_did_not_count_is_counted_whole_when_it_ends(gateway: ScriptedGateway) -> None:
    """Its guess was taken back, though nobody had counted it: the tenant's others got these tokens for nothing."""
    meter = ScriptedMeter()
    meter.admission = Admission(is_counted=False)
    await TenantGateway(gateway, meter, FEW, {}, Reception()).moderate(["x" * 40])
    assert meter.charges == [Charge("few", FEW.limits, 11, 0)]
