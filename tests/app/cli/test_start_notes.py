from __future__ import annotations

import json
from pathlib import Path

from app.cli.serve_run import MAX_NOTES, start_notes

TIME = "2026-11-26 05:49:09,665"


def test_warnings_of_the_parts_are_told_once_but_not_those_of_gateways(tmp_path: Path) -> None:
    lines = [
        f"INFO {TIME} antiphon_Model-m 58qvu1ju -- recorded 9 steps",
        f"WARNING {TIME} antiphon_Model-m 58qvu1ju -- cannot compile the CPU kernels",
        f"WARNING {TIME} antiphon_Model-m 58qvu1ju -- cannot compile the CPU kernels",
        "Traceback (most recent call last):",
    ]
    (tmp_path / "replica_antiphon_Model-m_58qvu1ju.log").write_text("\n".join(lines))
    (tmp_path / "replica_antiphon_Gateway_a.log").write_text(f"WARNING {TIME} antiphon_Gateway a -- not there yet")
    entry = {"levelname": "WARNING", "deployment": "antiphon_Batches", "message": "the folder is in use"}
    (tmp_path / "replica_antiphon_Batches_b.log").write_text(f'{json.dumps(entry)}\n{{"levelname": "WARN')
    assert start_notes(tmp_path) == [
        "note: Batches: the folder is in use",
        "note: Model-m: cannot compile the CPU kernels",
        f"Logs: {tmp_path}",
    ]


def test_a_flood_of_warnings_is_cut(tmp_path: Path) -> None:
    lines = [f"ERROR {TIME} antiphon_Registry a -- number {number}" for number in range(MAX_NOTES + 3)]
    (tmp_path / "replica_antiphon_Registry_a.log").write_text("\n".join(lines))
    notes = start_notes(tmp_path)
    assert len(notes) == MAX_NOTES + 2
    assert notes[-2] == "note: there are 3 more warnings"


def test_without_logs_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert start_notes(tmp_path / "none") == [f"Logs: {tmp_path / 'none'}"]
