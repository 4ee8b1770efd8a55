from __future__ import annotations

from pathlib import Path

import pytest

from deployments.batches.pages import PLACE_LASTS_S
from deployments.batches.store import BatchStore
from deployments.batches.values import PageQuestion
from engine.errors import RequestError
from tests.deployments.batches.batch_world import config, upload


def test_files_can_be_deleted_page_by_page(tmp_path: Path) -> None:
    """The last file of a page was gone when the next was asked for, which was refused."""
    now_s = [1_700_000_000.0]
    store = BatchStore(config(tmp_path), clock=lambda: now_s[0])
    ids = [upload(store, b"x") for _ in range(5)]
    found, after = [], None
    while page := store.list_files("blue", PageQuestion(2, after)).items:
        found += [file.file_id for file in page]
        after = found[-1]
        for file in page:
            store.delete_file("blue", file.file_id)
    assert found == ids[::-1]
    with pytest.raises(RequestError, match="There is no"):
        store.list_files("red", PageQuestion(2, ids[4]))
    with pytest.raises(RequestError, match="There is no"):
        store.list_batches("blue", PageQuestion(2, ids[4]))
    assert upload(store, b"x") not in ids
    assert len(store.list_files("blue", PageQuestion(2, ids[4], is_ascending=True)).items) == 1
    now_s[0] += PLACE_LASTS_S
    store.delete_file("blue", upload(store, b"x"))
    with pytest.raises(RequestError, match="There is no"):
        store.list_files("blue", PageQuestion(2, ids[4]))
    store.close()
