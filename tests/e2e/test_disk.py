"""A full disk under everything that the server writes: answers go on, and what was used is known once there is room."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

from tests.e2e.server import ADMIN_KEY, ROOT, Server, config_on_a_free_port, running, until
from tests.e2e.streams import BASE, Streamed, follow

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small disk of its own; its path is short, for Ray puts sockets there."""
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def server(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("RAY_TMPDIR", str(disk / "ray"))
    (disk / "ray").mkdir()
    path = config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path)
    tree = yaml.safe_load(path.read_text())
    arguments = tree["applications"][0]["args"]
    arguments["accounts"] = {"spool_folder": str(disk / "usage" / "spool")}
    arguments["batches"] = {"folder": str(disk / "batches")}
    path.write_text(yaml.safe_dump(tree))
    with running(path) as server:
        yield server


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def num_recorded(server: Server) -> int:
    with server.http() as http:
        data = http.get("/admin/usage", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()["data"]
    return sum(row["num_requests"] for row in data)


def test_answers_go_on_and_records_arrive_when_there_is_room_again(server: Server, disk: Path) -> None:
    expected = follow(server, 0, Streamed())
    assert expected.is_done
    until(lambda: num_recorded(server) == 1, "the first record")
    num_asked = 1
    filler = disk / "filler"
    fill(filler)
    with server.client() as client:
        # As long as there is a piece of a page left somewhere, it is used.
        while server.metric("antiphon:usage_unwritten") < 5:
            assert num_asked < 200, "the disk is not full"
            fill(filler)
            assert client.completions.create(model=BASE, prompt=f"{num_asked}", max_tokens=2).choices
            num_asked += 1
        streamed = follow(server, 0, Streamed())
        num_asked += 1
        assert (streamed.error, streamed.text) == (None, expected.text)
        with pytest.raises(openai.InternalServerError) as refused:
            client.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch")
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert server.metric("antiphon:usage_pending") >= 5
        assert server.metric("antiphon:log_lines_dropped_total", reason="disk_full") > 0
        filler.unlink()
        until(lambda: server.metric("antiphon:usage_pending") == 0, "the records to be stored")
        assert server.metric("antiphon:usage_unwritten") == server.metric("antiphon:usage_lost_total") == 0
        assert num_recorded(server) == num_asked
        assert client.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch").bytes == 100_000
