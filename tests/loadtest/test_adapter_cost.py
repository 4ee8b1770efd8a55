from __future__ import annotations

import pytest

from loadtest import adapter_cost
from loadtest.adapter_cost import base_and_adapters, cases, one_round, table
from loadtest.measure import summarise
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


def test_the_first_base_model_is_asked_with_its_own_adapters() -> None:
    assert base_and_adapters(served(2), "ours") == ("base", "a0", "a1")
    assert base_and_adapters(served(0), "ours") == ("other", "foreign")
    with pytest.raises(SystemExit, match="ours lists no base model with adapters"):
        base_and_adapters(served(0)[:2], "ours")


def test_by_default_one_adapter_and_as_many_as_streams_are_used() -> None:
    assert cases(None, 8, 9) == [0, 1, 8]
    assert cases(None, 8, 3) == [0, 1, 3]
    assert cases(None, 8, 1) == [0, 1]
    assert cases("8,2", 8, 9) == [0, 8, 2]
    for wrong in ("10", "0", "x", "", "²"):
        with pytest.raises(SystemExit, match="from 1 to 9"):
            cases(wrong, 8, 9)


def test_a_round_asks_every_model_and_the_table_relates_it_to_the_base() -> None:
    asked: list[str] = []

    def script(body: dict[str, object]) -> list[bytes]:
        asked.append(str(body["model"]))
        return answer(body)

    with scripted_server(script) as url:
        client = StreamClient(url, concurrency=2)
        exchanges = one_round(client, ["a0", "a1"], streams=2, requests=4, name="r", ids=TokenRange())
    found = summarise(exchanges, label="r")
    assert sorted(asked) == ["a0", "a0", "a1", "a1"]
    assert found.num_errors == 0
    lines = table({0: {"ours": [found]}, 2: {"ours": [found]}}).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:3]] for line in lines[2:]] == [["none", "ours"], ["2", "ours"]]
    assert [line.split("|")[4].strip() for line in lines[2:]] == ["1.00", "1.00"]


def test_a_server_that_fails_every_request_has_a_row_and_its_errors_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The division by no tokens ended the run with a traceback, which did not say what had failed."""
    monkeypatch.setattr(adapter_cost, "SETTLE_S", 0)
    with scripted_server(lambda body: (400, b'{"error": {"message": "too long"}}')) as url:
        monkeypatch.setattr("sys.argv", ["adapter_cost", "--url", f"ours={url}", "--streams", "2", "--repeats", "1"])
        adapter_cost.main()
    table, _, errors = capsys.readouterr().out.partition("\n\n")
    assert [[line.split("|")[place].strip() for place in (1, 4, 7)] for line in table.splitlines()[2:]] == [
        ["none", "-", "2"],
        ["1", "-", "2"],
    ]
    assert errors.splitlines() == [f"ours, adapters in use: {used}: HTTP 400: too long" for used in ("1", "none")]
