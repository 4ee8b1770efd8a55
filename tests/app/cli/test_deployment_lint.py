from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.cli.deployment_lint import option_lines
from tests.app.cli.test_config_lint import Lint


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"user_config": {}}, "d.user_config: must be left out; our deployments are configured by `args`"),
        ({"ray_actor_options": {"num_gpus": 1.5}}, "d.ray_actor_options.num_gpus: 1.5 is above 1 and not a whole"),
        ({"ray_actor_options": {"num_gpus": "2.5"}}, "d.ray_actor_options.num_gpus: 2.5 is above 1 and not a whole"),
        ({"ray_actor_options": {"resources": {"CPU": 1}}}, "d.ray_actor_options: Use the 'num_cpus' and 'num_gpus'"),
        ({"ray_actor_options": {"resources": {"a": -1}}}, "d.ray_actor_options: The quantity of resource a cannot be"),
        ({"ray_actor_options": {"num_cpus": float("inf")}}, "d.ray_actor_options: cannot convert float infinity"),
    ],
)  # fmt: skip
def test_options_that_no_replica_starts_with_are_one_line_each(options: dict[str, Any], line: str) -> None:
    (found,) = option_lines(options, "d")
    assert found.startswith(line)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"user_config": None, "ray_actor_options": None},
        {"ray_actor_options": {"num_cpus": "2.5", "num_gpus": 2.0, "resources": {"a": 0.5}}},
        {"ray_actor_options": {"num_gpus": 0.5, "runtime_env": {"env_vars": {"A": "b"}}}},
        # Its own lines come from Serve's schema.
        {"ray_actor_options": {"num_gpus": "many"}},
    ],
)
def test_options_that_replicas_start_with_are_no_mistakes(options: dict[str, Any]) -> None:
    assert list(option_lines(options, "d")) == []


def test_they_are_mistakes_of_the_whole_file(tmp_path: Path) -> None:
    (line,) = Lint(tmp_path)(("name: Gateway,", "name: Gateway, user_config: {a: 1},"))
    assert line.startswith("applications[0].deployments[0].user_config: must be left out")
