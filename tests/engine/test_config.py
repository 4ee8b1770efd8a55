from __future__ import annotations

from tests.engine.scripted import a_config


def test_there_are_rows_for_all_and_for_guests() -> None:
    assert a_config(max_num_seqs=5, num_guest_rows=2).num_rows == 7
