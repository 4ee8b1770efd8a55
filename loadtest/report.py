"""Write the table and HTML report of a load test; `python -m loadtest.report FOLDER` rewrites them from its records.

The folder's `settings.json` has the run's window and objectives, which options replace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from loadtest.arguments import above_0, add_slo, slo_of
from loadtest.measure import Exchange, Slo, Summary, read_exchanges, summarise
from loadtest.plots import Runs, draw_all
from loadtest.tables import markdown_table, number

SETTINGS_FILE = "settings.json"
COLUMNS = (
    "run",
    "requests",
    "errors",
    "requests/s",
    "output tokens/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "ITL p50 ms",
    "ITL p99 ms",
    "longest gap ms",
    "TPOT p50 ms",
    "e2e p50 ms",
    "e2e p99 ms",
    "cached prompt tokens",
    "goodput/s",
    "inside SLO",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What figures are taken of: the objectives, and the length of the window; None: from first to last event."""

    slo: Slo
    seconds: float | None = None

    def write(self, folder: Path) -> None:
        """Write them beside the records."""
        (folder / SETTINGS_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Read them; without a file, there is no objective and no window."""
        path = folder / SETTINGS_FILE
        if not path.exists():
            return cls(slo=Slo())
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(slo=Slo(**found["slo"]), seconds=found["seconds"])


def row_of(summary: Summary) -> tuple[str, ...]:
    """Return the cells of one run, in the order of `COLUMNS`."""
    return (
        summary.label,
        str(summary.num_requests),
        str(summary.num_errors),
        number(summary.requests_per_s),
        number(summary.output_tokens_per_s),
        number(summary.ttft_ms.p50),
        number(summary.ttft_ms.p99),
        number(summary.itl_ms.p50),
        number(summary.itl_ms.p99),
        number(summary.itl_ms.highest),
        number(summary.tpot_ms.p50),
        number(summary.e2e_ms.p50),
        number(summary.e2e_ms.p99),
        f"{summary.cached_share:.0%}",
        number(summary.goodput_per_s),
        f"{summary.goodput_share:.0%}",
    )


def slo_text(slo: Slo) -> str:
    """Return the objectives as one line."""
    bounds = [("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)]
    said = [f"{name} at most {number(bound)} ms" for name, bound in bounds if bound is not None]
    return f"SLO: {', '.join(said)}." if said else "SLO: the whole answer arrives."


def errors_by_text(exchanges: Sequence[Exchange]) -> list[tuple[str, int]]:
    """Return the error messages and their counts, most frequent first."""
    texts = [exchange.error for exchange in exchanges if exchange.error is not None]
    return sorted(((text, texts.count(text)) for text in set(texts)), key=lambda item: (-item[1], item[0]))


def write(folder: Path, runs: Runs, summaries: Sequence[Summary], slo: Slo) -> str:
    """Write `table.md`, `report.html` and the plots into a folder, and return the table with its notes."""
    table = markdown_table(COLUMNS, [row_of(summary) for summary in summaries])
    notes = [slo_text(slo)]
    for label, exchanges in runs.items():
        notes += [f"{label}: {times} x {text}" for text, times in errors_by_text(exchanges)]
    (folder / "table.md").write_text(table + "\n\n" + "\n".join(notes) + "\n", encoding="utf-8")
    pictures = draw_all(runs, folder)
    (folder / "report.html").write_text(_page(summaries, notes, pictures, folder), encoding="utf-8")
    return table + "\n\n" + "\n".join(notes)


def _page(summaries: Sequence[Summary], notes: Sequence[str], pictures: Sequence[Path], folder: Path) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values)

    rows = "\n".join(f"<tr>{cells('td', row_of(summary))}</tr>" for summary in summaries)
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    images = "\n".join(f'<img src="{escape(path.name)}" alt="{escape(path.stem)}">' for path in pictures)
    pages = sorted(path.name for path in folder.glob("locust-*.html"))
    links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in pages)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Load test</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid #ccc; padding: 0.3rem 0.6rem; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
img {{ max-width: 32%; min-width: 20rem; }}
</style>
</head>
<body>
<h1>Load test</h1>
<table>
<tr>{cells("th", COLUMNS)}</tr>
{rows}
</table>
{said}
{images}
<p>Locust's own pages: {links or "none"}.</p>
</body>
</html>
"""


def users_of(path: Path) -> int:
    """Return the number of users from the name of a records file (`records-8.jsonl`).

    Raises:
        ValueError: it has another name.
    """
    users = path.stem.removeprefix("records-")
    if not users.isdecimal():
        raise ValueError(f"{path} is not named after its number of users, like records-8.jsonl")
    return int(users)


def write_folder(folder: Path, settings: Settings) -> str:
    """Report on every records file in a folder and return the table.

    Raises:
        ValueError: there is none, or one is empty or something else.
    """
    files = sorted(folder.glob("records-*.jsonl"), key=users_of)
    if not files:
        raise ValueError(f"no records-*.jsonl in {folder}")
    runs = {f"{users_of(path)} users": read_exchanges(path) for path in files}
    summaries = [
        summarise(exchanges, label=label, window_s=settings.seconds, slo=settings.slo)
        for label, exchanges in runs.items()
    ]
    return write(folder, runs, summaries, settings.slo)


def main() -> None:
    """Rewrite the report of a folder."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.report", description=__doc__)
    parser.add_argument("folder", type=Path)
    add_slo(parser)
    parser.add_argument("--seconds", type=above_0, help="window over which rates are taken, instead of the run's")
    options = parser.parse_args()
    try:
        old = Settings.read(options.folder)
        new = slo_of(options)
        slo = Slo(ttft_ms=new.ttft_ms or old.slo.ttft_ms, tpot_ms=new.tpot_ms or old.slo.tpot_ms)
        print(write_folder(options.folder, Settings(slo=slo, seconds=options.seconds or old.seconds)))
    except ValueError as failure:
        raise SystemExit(f"loadtest.report: {failure}") from failure


if __name__ == "__main__":
    main()
