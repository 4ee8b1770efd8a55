"""Adapters from elsewhere: what may be fetched, and what becomes of sources that fail."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from huggingface_hub import constants

from adapters.errors import AdapterError
from adapters.folder import CONFIG_FILE, MAX_CONFIG_BYTES, TENSOR_FILE
from adapters.sources import AdapterSources, SourceError
from adapters.tokenizer_files import TOKENIZER_FILES
from tests.adapters.handmade import write, write_tokenizer

COMMIT = "c" * 40


class Server(ThreadingHTTPServer):
    """Answers paths with (status, content); a redirect's content is its target."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.authorizations: list[str | None] = []


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.authorizations.append(self.headers["authorization"])
        status, content = self.server.answers.get(self.path, (404, b""))
        self._send(status, content)

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        if status // 100 == 3:
            self.send_header("location", content.decode())
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    # The library has read HF_ENDPOINT when it was imported.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return server


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    folder = Path(write(tmp_path / "adapter"))
    return {file: (folder / file).read_bytes() for file in (CONFIG_FILE, TENSOR_FILE)}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    return target


def sources(*prefixes: str, max_bytes: int = 1 << 20, clock: Callable[[], float] = lambda: 0.0) -> AdapterSources:
    return AdapterSources(prefixes, max_bytes=max_bytes, timeout_s=10.0, clock=clock)


def fetched(target: Path, prefix: str, wanted: str) -> dict[str, bytes]:
    permitted = sources(prefix)
    permitted.fetch("a", permitted.url_of("a", wanted), str(target))
    return {path.name: path.read_bytes() for path in target.iterdir()}


def put(server: Server, folder: str, files: dict[str, bytes]) -> None:
    server.answers |= {f"{folder}/{file}": (200, content) for file, content in files.items()}


@pytest.mark.parametrize(
    "wanted",
    [
        "s3://bucket2/a", "s3://bucket/adapters2/a", "S3://bucket/adapters/a", "s3://bucket/a", "gs://bucket/adapters/a",
        "s3://bucket/adapters/../secret", "s3://bucket/adapters/./a", "s3://bucket/adapters/a/..", "s3://bucket/adapters//a",
        "s3://bucket/adapters/a%2e%2e", "s3://bucket/adapters/a?b", "s3://bucket/adapters/a#b", "s3://bucket/adapters/a\\b",
        "s3://bucket/adapters/a b", "s3://bucket/adapters/a\n", "s3://bucket/adapters/ä", "s3://bucket/adapters/\0",
        "simplecache::s3://bucket/adapters/a", "s3://bucket/adapters/a::file:///etc", "file:///etc", "org/name",
        "hf://my-organisation/a", "hf://datasets/my-org/a",
    ],
)  # fmt: skip
def test_nothing_beside_the_permitted_beginnings_is_fetched(wanted: str) -> None:
    with pytest.raises(AdapterError, match="source"):
        sources("s3://bucket/adapters/", "hf://my-org/").url_of("a", wanted)


def test_what_is_permitted_is_named_in_several_ways() -> None:
    permitted = sources("s3://bucket/adapters/", "hf://my-org/")
    for wanted, url in (
        ("s3://bucket/adapters/dt=1/a.b_c-d/", "s3://bucket/adapters/dt=1/a.b_c-d"),
        ("s3://bucket/adapters", "s3://bucket/adapters"),
        ("my-org/name", "hf://my-org/name"),
        ("hf://my-org/name@v1/sub", "hf://my-org/name@v1/sub"),
    ):
        assert permitted.url_of("a", wanted) == url
    assert permitted.may_be_hub_id("my-org/name@v1")
    assert not permitted.may_be_hub_id("/my-org/name")
    assert not sources("s3://bucket/").may_be_hub_id("my-org/name")


def test_two_files_of_an_object_store_are_fetched_and_no_more(target: Path, files: dict[str, bytes]) -> None:
    store = fsspec.filesystem("memory")
    for file, content in (files | {"adapter_model.bin": b"", "code.py": b""}).items():
        store.pipe(f"/two-files/a/{file}", content)
    assert fetched(target, "memory://two-files/", "memory://two-files/a") == files


def test_google_s_storage_is_asked_for_two_files(
    server: Server, target: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gcsfs", reason="the extra `gcs` is not installed")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    for file, content in files.items():
        name = f"/storage/v1/b/bucket/o/adapters%2Fa%2F{file}"
        about = {"kind": "storage#object", "bucket": "bucket", "name": f"adapters/a/{file}", "size": len(content)}
        server.answers[name] = (200, json.dumps(about).encode())
        server.answers[f"/download{name}?alt=media"] = (200, content)
    assert fetched(target, "gs://bucket/adapters/", "gs://bucket/adapters/a") == files
    (target / "other").mkdir()
    with pytest.raises(AdapterError, match="lacks"):
        fetched(target / "other", "gs://bucket/adapters/", "gs://bucket/adapters/b")


def test_a_web_server_is_asked_for_two_files(server: Server, target: Path, files: dict[str, bytes]) -> None:
    put(server, "/x/a", files)
    assert fetched(target, f"{server.url}/x/", f"{server.url}/x/a") == files
    assert server.asked == [f"/x/a/{file}" for file in files]


def test_a_redirect_is_not_followed(server: Server, target: Path, files: dict[str, bytes]) -> None:
    put(server, "/secret", files)
    server.answers |= {f"/x/a/{file}": (302, f"{server.url}/secret/{file}".encode()) for file in files}
    with pytest.raises(AdapterError, match="redirects"):
        fetched(target, f"{server.url}/x/", f"{server.url}/x/a")
    assert server.asked == [f"/x/a/{CONFIG_FILE}"]


@pytest.mark.parametrize("wanted", ["org/name@v1/sub", "hf://org/name@v1/sub"])
def test_an_adapter_of_the_hub_is_of_one_commit(
    hub: Server, target: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    about = {"id": "org/name", "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
    about["siblings"] = [{"rfilename": f"sub/{file}"} for file in files]
    hub.answers["/api/models/org/name/revision/v1"] = (200, json.dumps(about).encode())
    monkeypatch.setenv("HF_TOKEN", "secret")
    put(hub, "/kept/elsewhere", files)
    for file in files:
        hub.answers[f"/org/name/resolve/{COMMIT}/sub/{file}"] = (302, f"{hub.url}/kept/elsewhere/{file}".encode())
    permitted = sources("hf://org/")
    permitted.fetch("a", permitted.url_of("a", wanted), str(target), tokenizer="/nowhere")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert "Bearer secret" in hub.authorizations
    # What the hub does not list is not asked for.
    assert not [path for path in hub.asked if "token" in path]


@pytest.mark.parametrize("url", ["{server}/x/a", "{server}/x/b", "memory://absent/a", "hf://o/a", "hf://o"])
def test_what_a_source_does_not_have_is_the_callers_fault(
    hub: Server, target: Path, files: dict[str, bytes], url: str
) -> None:
    put(hub, "/x/a", {CONFIG_FILE: files[CONFIG_FILE]})
    with pytest.raises(AdapterError, match="lacks") as refused:
        sources().fetch("a", url.format(server=hub.url), str(target))
    assert hub.url not in str(refused.value)


def test_the_files_of_a_tokenizer_are_looked_at_before_the_tensors_are_fetched(
    server: Server, target: Path, tmp_path: Path, files: dict[str, bytes]
) -> None:
    base = write_tokenizer(tmp_path / "base", {"<|end|>": 2})
    permitted = sources(f"{server.url}/", max_bytes=sum(map(len, files.values())))
    own = {"tokenizer.json": (base / "tokenizer.json").read_bytes()}
    put(server, "/same", files | own)
    # What the server lacks, or has elsewhere, is no reason.
    server.answers["/same/added_tokens.json"] = (302, f"{server.url}/secret".encode())
    permitted.fetch("a", f"{server.url}/same", str(target), tokenizer=str(base))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert server.asked == [f"/same/{file}" for file in (CONFIG_FILE, *TOKENIZER_FILES, TENSOR_FILE)]
    server.asked.clear()
    put(server, "/own", files | own | {"added_tokens.json": b'{"<|tool|>": 3}'})
    (tmp_path / "second").mkdir()
    with pytest.raises(AdapterError, match="adds the token"):
        permitted.fetch("a", f"{server.url}/own", str(tmp_path / "second"), tokenizer=str(base))
    assert f"/own/{TENSOR_FILE}" not in server.asked


@pytest.mark.parametrize(("status", "word"), [(500, "cannot be read now"), (200, "more than the")])
def test_a_tokenizer_that_cannot_be_looked_at_is_no_missing_one(
    server: Server, target: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, status: int, word: str
) -> None:
    monkeypatch.setattr("adapters.sources.MAX_TOKENIZER_BYTES", 8)
    put(server, "/x", files)
    server.answers["/x/tokenizer.json"] = (status, bytes(9))
    with pytest.raises((SourceError, AdapterError), match=word):
        sources(f"{server.url}/").fetch("a", f"{server.url}/x", str(target), tokenizer="/nowhere")
    assert [path.name for path in target.iterdir()] == [CONFIG_FILE]


@pytest.mark.parametrize("status", [500, 503])
def test_a_source_that_fails_is_not(server: Server, target: Path, status: int) -> None:
    server.answers[f"/x/a/{CONFIG_FILE}"] = (status, b"internals")
    with pytest.raises(SourceError) as failed:
        fetched(target, f"{server.url}/x/", f"{server.url}/x/a")
    assert str(failed.value) == "The source of adapter 'a' cannot be read now."


def test_nobody_answers(target: Path) -> None:
    with pytest.raises(SourceError):
        fetched(target, "http://127.0.0.1:9/", "http://127.0.0.1:9/a")


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSOR_FILE])
def test_the_bytes_of_an_adapter_are_bounded(server: Server, target: Path, files: dict[str, bytes], file: str) -> None:
    put(server, "/x", files | {file: bytes(2 << 20)})
    permitted = sources(f"{server.url}/", max_bytes=(2 << 20) + len(files[CONFIG_FILE]) - 1)
    with pytest.raises(AdapterError, match=f"{file} has more than"):
        permitted.fetch("a", f"{server.url}/x", str(target))
    assert sum(path.stat().st_size for path in target.iterdir()) <= 2 << 20


def test_the_time_of_a_fetch_is_bounded(server: Server, target: Path, files: dict[str, bytes]) -> None:
    put(server, "/x", files)
    now_s = iter([100.0, 109.0, 111.0])
    with pytest.raises(SourceError, match="longer than 10 s"):
        sources(f"{server.url}/", clock=lambda: next(now_s)).fetch("a", f"{server.url}/x", str(target))


def test_tensors_may_be_longer_than_a_configuration_and_both_bounds_may_be_reached(
    server: Server, target: Path, files: dict[str, bytes]
) -> None:
    files = {CONFIG_FILE: files[CONFIG_FILE], TENSOR_FILE: bytes(MAX_CONFIG_BYTES + 1)}
    put(server, "/x", files)
    num_bytes, now_s = sum(map(len, files.values())), iter([100.0])
    permitted = sources(f"{server.url}/", max_bytes=num_bytes, clock=lambda: next(now_s, 110.0))
    permitted.fetch("a", f"{server.url}/x", str(target))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files


def test_a_source_that_sends_little_by_little_is_looked_at_as_often(
    server: Server, target: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of time was looked at once in a MiB, which such a source takes hours for."""
    put(server, "/x", files)
    may_end = threading.Event()

    def send_a_byte(answer: Answer, status: int, content: bytes) -> None:
        answer.send_response(status)
        answer.send_header("content-length", str(len(content)))
        answer.end_headers()
        answer.wfile.write(content[:1])
        may_end.wait(60)

    monkeypatch.setattr(Answer, "_send", send_a_byte)
    monkeypatch.setattr("adapters.sources.READ_TIMEOUT_S", 5.0)
    now_s = iter([0.0, 11.0])
    with pytest.raises(SourceError, match="longer than 10 s"):
        sources(f"{server.url}/", clock=lambda: next(now_s)).fetch("a", f"{server.url}/x", str(target))
    may_end.set()


def test_a_full_disk_of_ours_is_no_fault_of_a_source(
    server: Server, target: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "/x", files)
    monkeypatch.setattr("builtins.open", lambda *args: open_full())

    def open_full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        sources(f"{server.url}/").fetch("a", f"{server.url}/x", str(target))
