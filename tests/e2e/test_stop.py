"""A server that is told to end by SIGTERM, as machines do: what was being answered is answered."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ROOT, Server, config_on_a_free_port, until
from tests.e2e.streams import NUM_TOKENS, Streamed, follow

pytestmark = pytest.mark.e2e

LIMIT_S = 30.0


def test_streams_end_whole_newcomers_are_told_to_come_back_and_nothing_is_left(tmp_path: Path) -> None:
    server = Server(config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path), "--drain-s", str(LIMIT_S))
    seen = [Streamed(), Streamed()]
    try:
        server.wait_until_ready()
        expected = [follow(server, number, Streamed()).text for number in range(2)]
        [engine] = server.processes("Model-")
        logs = server.log_folder()
        with ThreadPoolExecutor(2) as pool, server.http() as http:
            ends = [pool.submit(follow, server, number, stream) for number, stream in enumerate(seen)]
            for stream in seen:
                assert stream.began.wait(60)
            # Long answers: their engine stands still while the server is told.
            os.kill(engine.pid, signal.SIGSTOP)
            num_lines = len(server.lines)
            server.process.send_signal(signal.SIGTERM)

            def is_unready() -> bool:
                # Asked anew each time: a proxy may close a connection between two requests, and then does.
                with server.http() as asking:
                    health = asking.get("/health")
                return health.status_code == 503 and "gateway" in health.json()["parts"]

            until(is_unready, "the server to say that it is stopping", patience_s=LIMIT_S)
            newcomer = http.post("/v1/embeddings", json={"model": "stdlib-chat", "input": "Hi"})
            assert newcomer.status_code == 503
            assert int(newcomer.headers["retry-after"]) >= 1
            os.kill(engine.pid, signal.SIGCONT)
            told = [end.result(LIMIT_S) for end in ends]
        assert [(stream.error, stream.text) for stream in told] == [(None, text) for text in expected]
        ended_at_s = time.monotonic()
        assert server.process.wait(60) == 0
        print(f"it ended {time.monotonic() - ended_at_s:.1f} s after its last answer")
        said = [line for line in server.whole_output()[num_lines:] if line.strip()]
        assert said == [
            f"Stopping; answers have {LIMIT_S:g} s to finish. Press Ctrl-C again to stop at once.\n",
            "Stopped.\n",
        ]
        [gateway_log] = logs.rglob("replica_*_Gateway_*.log")
        assert gateway_log.read_text().count(f" output_tokens={NUM_TOKENS} ") == 4, "each answer's line, the last too"
        with pytest.raises(httpx.TransportError), server.http() as http:
            http.get("/health")
    finally:
        server.stop()
