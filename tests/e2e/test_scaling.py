"""A server that Serve scales from no replica of the model to two and back, while streams run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.e2e.server import ROOT, Server, config_on_a_free_port, running, until
from tests.e2e.streams import Streamed, follow, has_replicas, prompts_seen

pytestmark = pytest.mark.e2e

NUM_PROMPTS, NUM_BUSY, NUM_CALM = 3, 6, 2
SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "target_ongoing_requests": NUM_CALM,
    "metrics_interval_s": 0.2,
    "look_back_period_s": 0.5,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 0.5,
}


def scaled_config(folder: Path) -> Path:
    path = config_on_a_free_port(ROOT / "serve_config.yaml", folder)
    tree = yaml.safe_load(path.read_text())
    [application] = tree["applications"]
    del application["args"]["safety"]
    # Every prompt starts the tokenizer if none runs, too.
    application["args"]["tokenizer"] = {"local_chars": 0}
    application["deployments"] = [
        {"name": name, "autoscaling_config": SCALING, "ray_actor_options": {"num_cpus": 0.1}}
        for name in ("Model-stdlib-chat", "Tokenizer")
    ]
    path.write_text(yaml.safe_dump(tree))
    return path


def is_healthy(server: Server) -> bool:
    with server.http() as http:
        return http.get("/health").status_code == 200


def test_streams_are_what_they_were_while_replicas_come_and_go(tmp_path: Path) -> None:
    """While two deployments were at zero, `/health` was sometimes a 500: Serve's status was asked in two threads."""
    is_calm, is_over = threading.Event(), threading.Event()
    answers: list[tuple[int, Streamed]] = []

    def keep_streaming(worker: int) -> None:
        number = worker
        while not is_over.is_set() and (worker < NUM_CALM or not is_calm.is_set()):
            number = (number + 1) % NUM_PROMPTS
            answers.append((number, follow(server, number, Streamed())))

    with running(scaled_config(tmp_path)) as server:
        assert has_replicas(server, 0)
        assert all(is_healthy(server) for _ in range(5))
        alone = [follow(server, number, Streamed()) for number in range(NUM_PROMPTS)]
        assert all(answer.is_done and answer.error is None for answer in alone)
        with ThreadPoolExecutor(NUM_BUSY) as pool:
            work = [pool.submit(keep_streaming, worker) for worker in range(NUM_BUSY)]
            try:
                until(lambda: len(seen := prompts_seen(server)) == 2 and all(seen), "two replicas that answer")
                is_calm.set()
                until(lambda: has_replicas(server, 1), "one replica")
            finally:
                is_calm.set()
                is_over.set()
        for end in work:
            end.result()
        for number, answer in answers:
            assert (answer.error, answer.is_done, answer.text) == (None, True, alone[number].text)
        until(lambda: has_replicas(server, 0), "no replica")
        until(lambda: is_healthy(server), "health")
        assert follow(server, 0, Streamed()).text == alone[0].text
