from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.measure import Exchange, Slo
from loadtest.report import Settings, errors_by_text, main, write_folder


def record(started_s: float, error: str | None = None) -> Exchange:
    return Exchange(
        workload="chat",
        model="<base>",
        started_s=started_s,
        status=200,
        error=error,
        event_ms=[] if error else [30.0, 45.0, 50.0],
        end_ms=55.0,
        prompt_tokens=8,
        completion_tokens=3,
    )


def leave_records(folder: Path) -> None:
    for users in (8, 32, 1):
        records = [record(10.0 + place / 10) for place in range(users)] + [record(11.0, "HTTP 503: <full>")]
        (folder / f"records-{users}.jsonl").write_text("".join(one.to_json() + "\n" for one in records))


def test_a_folder_of_records_becomes_a_report(tmp_path: Path) -> None:
    leave_records(tmp_path)
    (tmp_path / "locust-8.html").touch()
    said = write_folder(tmp_path, Settings(slo=Slo(ttft_ms=100), seconds=5.0))
    assert said.splitlines()[2].startswith("| 1 users")
    assert "TTFT at most 100 ms" in said
    assert "8 users: 1 x HTTP 503: <full>" in said
    assert (tmp_path / "table.md").read_text().strip() == said.strip()
    page = (tmp_path / "report.html").read_text()
    assert "locust-8.html" in page
    assert "&lt;full&gt;" in page
    assert "<full>" not in page
    for picture in ("ttft.png", "itl.png", "throughput.png"):
        assert (tmp_path / picture).stat().st_size > 1000
        assert picture in page


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no records-\*.jsonl"):
        write_folder(tmp_path, Settings(slo=Slo()))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("records-1.jsonl", "{", "no record"),
        ("records-1.jsonl", '{"a": 1}', "no record"),
        ("records-x.jsonl", "", "its number of users"),
    ],
)
def test_something_else_than_records_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, said: str
) -> None:
    (tmp_path / file).write_text(content)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"{file}.*{said}"):
        main()


def test_a_report_is_regenerated_with_the_window_and_the_objectives_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took its rates from the first to the last event, and had no objectives: another table of the same records."""
    leave_records(tmp_path)
    settings = Settings(slo=Slo(ttft_ms=40), seconds=5.0)
    settings.write(tmp_path)
    assert Settings.read(tmp_path) == settings
    said = write_folder(tmp_path, settings)
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    main()
    assert capsys.readouterr().out.strip() == said.strip()
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "--slo-ttft-ms", "20"])
    main()
    assert "TTFT at most 20.0 ms" in capsys.readouterr().out


def test_errors_are_counted_by_their_text() -> None:
    found = errors_by_text([record(0, "b"), record(0, "a"), record(0, "a"), record(0)])
    assert found == [("a", 2), ("b", 1)]
