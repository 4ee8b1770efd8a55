from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from app.http.api import create_app
from app.settings import LimitSettings
from tests.app.scripted_gateway import ScriptedGateway
from tests.contract.published import CHECKED


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
def app(gateway: ScriptedGateway) -> FastAPI:
    limits = LimitSettings(max_body_bytes=20_000, max_messages=8, max_prompt_chars=5000, max_prompts=4)
    return create_app(gateway, limits=limits, moderation_model="guard")


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    # The transport raises what the application lets through, so that no error can hide behind a server's last resort.
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", event_hooks=CHECKED) as http:
        yield http
