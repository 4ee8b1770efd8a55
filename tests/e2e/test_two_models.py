"""Two base models in one application, and the end of a server: nothing that it started outlives it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from app.preflight import is_port_free
from tests.e2e.server import ROOT, config_on_a_free_port, running, until

pytestmark = pytest.mark.e2e


def test_two_models_answer_side_by_side_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    with running(config_on_a_free_port(ROOT / "examples" / "two_models.yaml", tmp_path)) as server:
        client = server.client()
        listed = {model.id: model.model_dump().get("parent") for model in client.models.list()}
        assert listed == {
            "stdlib-chat": None,
            "json-answers": "stdlib-chat",
            "formatted": "stdlib-chat",
            "stdlib-draft": None,
        }
        messages = [{"role": "user", "content": "What does os.getcwd do?"}]
        answers = {
            name: client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60)
            for name in listed
        }
        assert "current working directory" in (answers["stdlib-chat"].choices[0].message.content or "")
        assert (answers["formatted"].choices[0].message.content or "").startswith("**os.getcwd**: ")
        assert all(answer.model == name and answer.choices[0].message.content for name, answer in answers.items())
        assert len(server.processes("ServeReplica:antiphon:Model-")) == 2

        started = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        _, alive = psutil.wait_procs(started, timeout=30)
        assert alive == []
        until(lambda: is_port_free("127.0.0.1", server.port), "the port to be free")
