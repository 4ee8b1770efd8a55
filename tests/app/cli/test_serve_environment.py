from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import ray

from app.cli.serve_environment import CLUSTER_ONLY, missing, recommended


def values(**options: int) -> dict[str, str]:
    return {variable.name: variable.value for variable in recommended(**{"num_cores": 8} | options)}


def test_the_names_are_ones_that_ray_reads() -> None:
    from ray.serve._private import constants

    source = inspect.getsource(constants)
    assert [name for name in values() if name.startswith("RAY_SERVE_") and f'"{name}"' not in source] == []


def test_a_node_reads_how_long_it_serves_without_the_head() -> None:
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert CLUSTER_ONLY.name.removeprefix("RAY_").encode() in raylet.read_bytes()


def test_haproxy_gets_half_of_the_cores_up_to_four_threads() -> None:
    threads = [values(num_cores=cores)["RAY_SERVE_HAPROXY_NBTHREAD"] for cores in (1, 2, 4, 8, 64)]
    assert threads == ["1", "1", "2", "4", "4"]


def test_lines_of_logs_are_written_at_once() -> None:
    """Serve's replicas keep as many as this says, and lose what they keep when they end."""
    assert values()["RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"] == "1"


def test_draining_is_chosen_by_the_caller() -> None:
    assert values(drain_s=0)["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "0"


def test_what_is_lost_is_said_for_each_variable_that_costs_something() -> None:
    lines = missing({})
    assert len(lines) == 9
    assert all(line.startswith("RAY_") and "is not set: " in line for line in lines)
    assert missing(values()) == []
    assert len(missing({"RAY_SERVE_ENABLE_HA_PROXY": "0"})) == 8


_CALL = """
import asyncio
import grpc


async def answer(request, context):
    return request


async def main():
    server = grpc.aio.server()
    calls = {"m": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        print(await channel.unary_unary("/s/m")(b"heard"))
    await server.stop(0)


asyncio.run(main())
"""


def test_calls_between_deployments_go_round_the_proxy_for_the_world_outside() -> None:
    """Serve's channels are made as this one is; nothing listens on port 9."""
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    exempted = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
    without = {name: value for name, value in os.environ.items() if name not in exempted} | proxy

    def heard(environment: dict[str, str]) -> bool:
        done = subprocess.run([sys.executable, "-c", _CALL], env=environment, capture_output=True, timeout=60)
        return b"heard" in done.stdout

    assert not heard(without)
    assert heard(without | values())
