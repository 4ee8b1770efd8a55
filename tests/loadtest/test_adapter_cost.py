from __future__ import annotations

import pytest

from loadtest.adapter_cost import model_groups, one_round, table
from loadtest.stream_client import ServedModel, StreamClient
from loadtest.workloads import TokenRange
from tests.loadtest.scripted_server import answer, scripted_server


def served(adapters: int) -> list[ServedModel]:
    return [
        ServedModel(name="base", parent=None),
        ServedModel(name="other", parent=None),
        *(ServedModel(name=f"a{index}", parent="base") for index in range(adapters)),
        ServedModel(name="foreign", parent="other"),
    ]


def test_the_base_one_adapter_and_as_many_as_streams_are_asked() -> None:
    assert model_groups(served(9), 8) == {
        "none": ("base",),
        "1": ("a0",),
        "8": tuple(f"a{index}" for index in range(8)),
    }
    assert list(model_groups(served(1), 8)) == ["none", "1"]
    with pytest.raises(SystemExit, match="base has no adapters"):
        model_groups(served(0), 8)


def test_a_round_asks_every_model_and_the_table_relates_it_to_the_base() -> None:
    asked: list[str] = []

    def script(body: dict[str, object]) -> list[bytes]:
        asked.append(str(body["model"]))
        return answer(body)

    with scripted_server(script) as url:
        found = one_round(StreamClient(url, concurrency=4), ["a0", "a1"], streams=4, name="r", ids=TokenRange())
    assert sorted(asked) == ["a0", "a0", "a1", "a1"]
    assert found.num_errors == 0
    lines = table({"none": [found], "2": [found]}).splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["1.00", "1.00"]
