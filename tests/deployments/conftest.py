from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deployments.config import ChannelConfig, ModelConfig
from deployments.gateway.gateway import Gateway
from deployments.routing.board import board_of
from engine.build import build_engine
from engine.config import EngineConfig
from tests.deployments.in_process import SECRET, Judge, Replicas, open_gateway
from tests.deployments.tiny_models import CONTEXT, write_chat_model

OpenGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture(autouse=True)
def fresh_boards() -> None:
    """Forget the replicas of other tests: a gateway asks those of a model that has several for reports."""
    board_of.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = str(write_chat_model(tmp_path_factory.mktemp("chat")))
    engine = EngineConfig(
        model_path=folder,
        dtype="float32",
        num_threads=1,
        max_num_seqs=8,
        kv_cache_bytes=4 << 20,
        max_queued_requests=8,
        # Tests count steps.
        num_speculative_tokens=0,
    )
    return ModelConfig(
        name="chat", engine=engine, tokenizer_path=folder, max_model_len=CONTEXT, vocab_size=289, hidden_size=32
    )


class Serving:
    """One model, its replica and any number of gateways."""

    def __init__(self, model: ModelConfig, channel: ChannelConfig) -> None:
        self.model = model
        self.channel = channel
        self.replicas = Replicas(lambda: build_engine(model.engine, model.adapters), channel)

    async def gateway(self, judge: Judge | None = None, *, model: ModelConfig | None = None, **options: Any) -> Gateway:
        return await open_gateway(model or self.model, self.replicas, self.channel, judge=judge, **options)


@pytest.fixture(params=["tcp", "handle"])
async def serving(request: pytest.FixtureRequest, tiny_model: ModelConfig) -> AsyncIterator[Serving]:
    serving = Serving(tiny_model, ChannelConfig(transport=request.param, secret=SECRET, host="127.0.0.1"))
    yield serving
    await serving.replicas.server.stop()


@pytest.fixture
def gateway(serving: Serving) -> OpenGateway:
    return serving.gateway
