from __future__ import annotations

import inspect

from app.cli.serve_environment import missing, recommended


def values(**options: int) -> dict[str, str]:
    return {variable.name: variable.value for variable in recommended(**{"num_cores": 8} | options)}


def test_the_names_are_ones_that_ray_reads() -> None:
    from ray.serve._private import constants

    source = inspect.getsource(constants)
    assert [name for name in values() if name.startswith("RAY_SERVE_") and f'"{name}"' not in source] == []


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
