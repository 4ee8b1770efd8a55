"""What Serve is handed for each deployment: its version decides whether replicas that run are replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import deploy_args_to_deployment_info, get_deploy_args
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion

from adapters.identity import AdapterRef
from app.own_version import model_version, own_digest, with_version
from deployments.config import ChannelConfig, ModelConfig
from engine.config import EngineConfig
from engine.loading import fingerprint
from tests.deployments.tiny_models import write_chat_model


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    folder = tmp_path / "chat"
    write_chat_model(folder)
    engine = EngineConfig(model_path=str(folder))
    return ModelConfig(name="chat", engine=engine, tokenizer_path=str(folder), max_model_len=64, vocab_size=8)


def test_what_a_model_s_replicas_are_made_of_decides_and_nothing_else(model: ModelConfig, tmp_path: Path) -> None:
    channel = ChannelConfig(secret=b"s" * 32)
    version = model_version(model, channel)
    adapter = AdapterRef(name="sql", digest=b"d", path=str(tmp_path))  # type: ignore[arg-type]
    assert model_version(replace(model, adapters=(adapter,)), channel) == version
    assert model_version(replace(model, chat_template="t", template_by_pattern={"sql": "t"}), channel) == version
    changed = [
        model_version(replace(model, engine=replace(model.engine, max_num_seqs=3)), channel),
        model_version(model, replace(channel, transport="handle")),
        model_version(model, channel, {"has_accounts": True}),
    ]
    with open(tmp_path / "chat" / "tokenizer.json", "a") as file:
        file.write(" ")
    changed.append(model_version(model, channel))
    assert len({version, *changed}) == 5


def test_code_that_has_changed_is_another_version(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "code"
    (root / "engine").mkdir(parents=True)
    monkeypatch.setattr(fingerprint, "ROOT", root)
    versions = []
    for text in ("a = 1", "a = 2"):
        (root / "engine" / "step.py").write_text(text)
        own_digest.cache_clear()
        versions.append(model_version(model))
    own_digest.cache_clear()
    assert len(set(versions)) == 2


def test_serve_keeps_the_version_that_a_deployment_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it starts a cluster, to ask whose job this is.
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))

    class Actor:
        def __call__(self) -> None: ...

    def told(version: str) -> DeploymentInfo:
        bound = with_version(serve.deployment(Actor).options(name="Model-chat", max_surge_percent=7), "ours").bind()
        (deployment,) = build_app(bound, name="antiphon", default_runtime_env={}).deployments
        arguments = get_deploy_args(
            name="Model-chat",
            replica_config=deployment._replica_config,
            deployment_config=deployment._deployment_config,
            version=version,
        )
        return deploy_args_to_deployment_info(**arguments, app_name="antiphon")

    first, second = told("one of Serve's"), told("another one")
    assert first.version == second.version == "ours"
    assert first.deployment_config.max_surge_percent == 7
    assert first.deployment_config != second.deployment_config, "Serve stops to scale what it takes for the same"
    versions = [DeploymentVersion(info.version, info.deployment_config, {}) for info in (first, second)]
    assert not versions[0].requires_actor_restart(versions[1])
    assert not versions[0].requires_actor_reconfigure(versions[1])
