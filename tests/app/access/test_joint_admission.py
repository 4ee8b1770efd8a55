"""The answers of a request begin together or not at all, and only those that begin are counted."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, TenantGateway, key_digest
from app.http.api import create_app
from deployments.accounts.actor import Accounts
from deployments.accounts.meter import Meter
from deployments.accounts.values import TenantLimits
from deployments.config import AccountsConfig
from deployments.generation import GenerationRequest, TextPrompt
from deployments.timeline import Reception
from engine.request import SamplingParams
from tests.app.scripted_gateway import ScriptedGateway
from tests.deployments.accounts.test_meter import LocalHandle, a_meter

PROMPT = "word " * 48
"""61 tokens by the estimate, 50 by the scripted gateway."""


@pytest.fixture
def meter(tmp_path: Path) -> Meter:
    config = AccountsConfig(database_url=f"sqlite:///{tmp_path}/a.sqlite", spool_folder=str(tmp_path / "usage"))
    return a_meter(LocalHandle(Accounts(config)), tmp_path)


async def complete(gateway: ScriptedGateway, meter: Meter, limits: TenantLimits, **fields: Any) -> httpx.Response:
    gateway.meter = meter
    ring = KeyRing(
        tenant_by_name={"blue": Tenant(name="blue", limits=limits)}, name_by_digest={key_digest("b"): "blue"}
    )
    app = create_app(gateway, key_ring=ring)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        body = {"model": "base", "prompt": "a"} | fields
        return await client.post("/v1/completions", json=body, headers={"x-api-key": "b"})


@pytest.mark.parametrize("fields", [{"prompt": [PROMPT, PROMPT]}, {"prompt": PROMPT, "n": 2}, {"prompt": PROMPT * 2}])
async def test_prompts_that_together_exceed_a_window_begin_in_an_unused_one(
    gateway: ScriptedGateway, meter: Meter, fields: dict[str, Any]
) -> None:
    """The first was admitted and then canceled, as the second was refused: in every window again, forever."""
    limits = TenantLimits(input_tokens_per_minute=100)
    assert (await complete(gateway, meter, limits, **fields)).status_code == 200
    assert (await complete(gateway, meter, limits)).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
async def test_of_answers_that_do_not_all_fit_none_is_begun_or_counted(
    gateway: ScriptedGateway, meter: Meter, stream: bool
) -> None:
    limits = TenantLimits(requests_per_minute=5, input_tokens_per_minute=10_000, concurrent_requests=4)
    begun = await complete(gateway, meter, limits, n=3, stream=stream)
    assert (begun.status_code, begun.headers["x-ratelimit-remaining-requests"]) == (200, "2")
    num_begun, left = len(gateway.requests), begun.headers["x-ratelimit-remaining-input-tokens"]
    refused = await complete(gateway, meter, limits, n=3, stream=stream)
    assert (refused.status_code, len(gateway.requests)) == (429, num_begun)
    assert refused.headers["x-ratelimit-remaining-requests"] == "2"
    await meter.settle()
    last = await complete(gateway, meter, limits, n=2, stream=stream)
    assert (last.status_code, last.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert int(left) > int(last.headers["x-ratelimit-remaining-input-tokens"])
    await meter.settle()
    assert not +meter._running


async def test_answers_count_as_running_from_when_they_are_asked_for_until_each_has_ended(
    gateway: ScriptedGateway, meter: Meter
) -> None:
    own = TenantGateway(
        gateway, meter, Tenant(name="blue", limits=TenantLimits(concurrent_requests=3)), {}, Reception()
    )
    request = GenerationRequest(
        request_id="r", model="base", prompt=TextPrompt(text="a"), params=SamplingParams(max_tokens=1)
    )
    first, second, third = (own.generate(request) for _ in range(3))
    async with aclosing(first), aclosing(second):
        leaving = asyncio.ensure_future(anext(third))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(anext(first), anext(second))
        assert meter._running["blue"] == 2
    assert meter._running["blue"] == 0
