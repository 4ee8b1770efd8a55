"""Workers of a running server are forks of one process; without it no test finds them any more: this one is last."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.server import Server, until
from tests.e2e.streams import BASE, LONG

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_are_forks_that_do_not_need_what_forked_them(server: Server) -> None:
    question = {"model": BASE, "messages": [{"role": "user", "content": f"What does os.getcwd do? {LONG}"}]}
    with server.http() as http:
        [template] = server.processes("app.cli.worker_template")
        titles = ("ray::ServeReplica", "ray::ServeController", "ray::HAProxyManager", "ray::ProxyActor")
        workers = {process for title in titles for process in server.processes(title)}
        assert len(workers) == 10
        assert workers <= set(template.children())
        [tokenizer] = server.processes("ray::ServeReplica:antiphon:Tokenizer")
        template.kill()
        tokenizer.kill()

        def is_replaced() -> bool:
            return server.processes("ray::ServeReplica:antiphon:Tokenizer") not in ([], [tokenizer])

        until(is_replaced, "another tokenizer, which is no fork")

        def answers() -> bool:
            return http.post("/v1/chat/completions", json=question).status_code == 200

        until(answers, "an answer")
        assert all(worker.is_running() for worker in workers - {tokenizer})
