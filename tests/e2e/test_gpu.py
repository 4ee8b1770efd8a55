"""A server on a GPU; where there is none, its replicas simulate one."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from openai.types.chat import ChatCompletionUserMessageParam

from tests.e2e.server import ADMIN_KEY, ROOT, config_on_a_free_port, running

pytestmark = pytest.mark.e2e

BEGUN = {"stdlib-chat": "os.getcwd: Return a", "json-answers": '{"answer": "os', "markdown": "**os.getcwd**"}
"""What each model says first of os.getcwd."""


def config_on_a_gpu(folder: Path) -> Path:
    """The bundled model in bfloat16, with room for what a test asks."""
    config = config_on_a_free_port(ROOT / "serve_config.yaml", folder)
    tree = yaml.safe_load(config.read_text())
    [application] = tree["applications"]
    sizes = {"max_model_len": 256, "max_num_seqs": 3, "max_batched_tokens": 64, "kv_cache_bytes": 1 << 22}
    application["args"]["models"][0]["engine"] = {"device": "cuda", "dtype": "bfloat16", **sizes}
    for deployment in application["deployments"]:
        if deployment["name"].startswith("Model-"):
            deployment["ray_actor_options"]["num_gpus"] = 1
    config.write_text(yaml.safe_dump(tree))
    return config


@pytest.fixture
def _gpu_in_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    places = [str(ROOT / "tests/simulated_gpu/replicas"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"GPU": 1}))


@pytest.mark.usefixtures("_gpu_in_replicas")
def test_its_answers_are_those_of_a_cpu(tmp_path: Path) -> None:
    """The model's own and those of adapters, asked for at once."""
    with running(config_on_a_gpu(tmp_path)) as server, ThreadPoolExecutor() as pool:
        client = server.client()

        def ask(model: str) -> str:
            question: ChatCompletionUserMessageParam = {"role": "user", "content": "What does os.getcwd do?"}
            made = client.chat.completions.create(model=model, messages=[question], temperature=0, max_tokens=8)
            return made.choices[0].message.content or ""

        for begun, answer in zip(BEGUN.values(), pool.map(ask, BEGUN), strict=True):
            assert answer.startswith(begun)
        [log] = (server.log_folder() / "serve").glob("replica_*Model-stdlib-chat*.log")
        assert "recorded" in log.read_text()
        with server.http() as http:
            listed = http.get("/v1/adapters", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()["data"]
        places = {entry["id"]: set(entry["versions"][0]["replicas"].values()) for entry in listed}
        assert places == {"json-answers": {"device"}, "markdown": {"device"}, "usage-line": set()}
