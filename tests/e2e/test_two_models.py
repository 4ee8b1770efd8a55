"""Two base models in one application, and the end of a server: nothing that it started outlives it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from app.cli.preflight import listen_error
from tests.deployments.tiny_models import write_cross_encoder
from tests.e2e.server import ROOT, Server, config_on_a_free_port, running, until

pytestmark = pytest.mark.e2e

FULL_WITH_THREE = {"num_threads": 1, "max_num_seqs": 2, "max_queued_requests": 1}


def check_that_a_full_replica_is_healthy(server: Server) -> None:
    """Its health and metrics waited for a place in it, and so Kubernetes took a busy server out of service."""
    options: dict[str, Any] = {"model": "stdlib-draft", "prompt": "import os", "max_tokens": 1800}
    num_done = 0

    def read() -> None:
        nonlocal num_done
        server.client().completions.create(**options, extra_body={"ignore_eos": True})
        num_done += 1

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(read) for _ in range(3)]
        until(lambda: server.metric("vllm:num_requests_waiting", model_name="stdlib-draft") == 1, "a full replica")
        with server.http() as http:
            health = http.get("/health")
        assert (health.status_code, health.json()["status"], num_done) == (200, "ready", 0)
        for answer in answers:
            answer.result()


def test_two_models_answer_side_by_side_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    config = config_on_a_free_port(ROOT / "examples" / "two_models.yaml", tmp_path)
    tree = yaml.safe_load(config.read_text())
    judge = {"name": "judge", "path": str(write_cross_encoder(tmp_path / "judge"))}
    tree["applications"][0]["args"]["rerankers"] = [judge]
    tree["applications"][0]["args"]["models"][1]["engine"] = FULL_WITH_THREE
    config.write_text(yaml.safe_dump(tree))
    with running(config) as server:
        client = server.client()
        listed = {model.id: model.model_dump().get("parent") for model in client.models.list()}
        assert listed == {
            "stdlib-chat": None,
            "json-answers": "stdlib-chat",
            "formatted": "stdlib-chat",
            "stdlib-draft": None,
            "judge": None,
        }
        del listed["judge"]
        messages = [{"role": "user", "content": "What does os.getcwd do?"}]
        answers = {
            name: client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60)
            for name in listed
        }
        assert "current working directory" in (answers["stdlib-chat"].choices[0].message.content or "")
        assert (answers["formatted"].choices[0].message.content or "").startswith("**os.getcwd**: ")
        assert all(answer.model == name and answer.choices[0].message.content for name, answer in answers.items())
        assert len(server.processes("ServeReplica:antiphon:Model-")) == 2

        with server.http() as http:
            documents = ["os.getcwd", "A bird.", "x"]
            found = http.post("/v1/rerank", json={"model": "judge", "query": "Where?", "documents": documents}).json()
            assert http.get("/health").json()["parts"]["reranker judge"] == "ready"
            refused = http.post("/v1/score", json={"model": "judge", "text_1": "a", "text_2": "b " * 300})
        scores = [entry["relevance_score"] for entry in found["results"]]
        assert scores == sorted(scores, reverse=True)
        assert [documents[entry["index"]] for entry in found["results"]] == [
            entry["document"]["text"] for entry in found["results"]
        ]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2")

        check_that_a_full_replica_is_healthy(server)

        started = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        _, alive = psutil.wait_procs(started, timeout=30)
        assert alive == []
        until(lambda: listen_error("127.0.0.1", server.port) is None, "the port to be free")
