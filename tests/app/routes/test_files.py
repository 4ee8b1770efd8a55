from __future__ import annotations

import errno
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, key_digest
from app.http import file_form
from app.routes.files import DeletedFile, FileList, FileObject
from deployments.batches.values import MIN_FILE_BYTES
from tests.app.batch_gateway import serve

RING = KeyRing(
    tenant_by_name={"blue": Tenant(name="blue"), "red": Tenant(name="red")},
    name_by_digest={key_digest("b"): "blue", key_digest("r"): "red"},
)
BATCH = {"purpose": "batch"}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    _, client = await serve(tmp_path)
    async with client:
        yield client


def named(name: str = "in.jsonl", content: bytes = b"{}\n") -> dict[str, Any]:
    return {"file": (name, content, "application/jsonl")}


async def test_a_file_is_kept_described_listed_read_and_deleted(http: httpx.AsyncClient) -> None:
    content = b'{"x": 1}\r\n\x00\xff' * 900
    made = await http.post("/v1/files", data=BATCH, files=named(content=content))
    file = FileObject.model_validate(made.json())
    assert (file.bytes, file.filename, file.purpose, file.expires_at) == (len(content), "in.jsonl", "batch", None)
    assert (await http.get(f"/v1/files/{file.id}")).json() == made.json()
    listed = FileList.model_validate((await http.get("/v1/files?purpose=batch&limit=5")).json())
    assert (listed.data, listed.has_more, listed.first_id, listed.last_id) == ([file], False, file.id, file.id)
    read = await http.get(f"/v1/files/{file.id}/content")
    assert (read.content, read.headers["content-type"]) == (content, "application/octet-stream")
    deleted = await http.delete(f"/v1/files/{file.id}")
    assert DeletedFile.model_validate(deleted.json()) == DeletedFile(id=file.id)
    gone = await http.get(f"/v1/files/{file.id}/content")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "file_not_found")
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_content_that_is_gone_is_not_found(http: httpx.AsyncClient, tmp_path: Path) -> None:
    made = await http.post("/v1/files", data=BATCH, files=named())
    (tmp_path / "files" / made.json()["id"]).unlink()
    gone = await http.get(f"/v1/files/{made.json()['id']}/content")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "file_not_found")


async def test_under_a_route_prefix_too_a_file_may_be_larger_than_a_body(tmp_path: Path) -> None:
    _, client = await serve(tmp_path, prefix="/llm")
    async with client:
        response = await client.post("/v1/files", data=BATCH, files=named(content=b"x" * 20_000))
    assert FileObject.model_validate(response.json()).bytes == 20_000


async def test_the_file_may_come_before_the_other_fields_and_in_pieces(http: httpx.AsyncClient) -> None:
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a\x01.jsonl"\r\n\r\n'
    fields = b"".join(
        b'\r\n--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s' % pair
        for pair in (
            (b"purpose", b"batch"),
            (b"expires_after[anchor]", b"created_at"),
            (b"expires_after[seconds]", b"3600"),
        )
    )

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (head, b"x" * 5000, b"y" * 5000, fields, b"\r\n--b--\r\n"):
            yield piece

    response = await http.post(
        "/v1/files", content=pieces(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    file = FileObject.model_validate(response.json())
    assert (file.bytes, file.filename, file.expires_at) == (10_000, "a.jsonl", file.created_at + 3600)


@pytest.mark.parametrize(
    ("data", "files", "status", "param"),
    [
        ({}, named(), 400, "purpose"),
        (BATCH, {"other": ("x", b"x")}, 400, "other"),
        (BATCH, {"purpose": ("x", b"x")}, 400, "purpose"),
        (BATCH | {"expires_after[seconds]": ["3600", "4000"]}, named(), 400, "expires_after[seconds]"),
        ({"purpose": "fine-tune"}, named(), 400, "purpose"),
        (BATCH | {"file": "text"}, {"x": None}, 400, "file"),
        (BATCH | {"y": "1"}, named(), 400, "y"),
        (BATCH | {"expires_after[seconds]": "3600"}, named(), 400, "expires_after.anchor"),
        (
            BATCH | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            named(),
            400,
            "expires_after.seconds",
        ),
        (
            BATCH | {"expires_after[anchor]": "created_at", "expires_after[seconds]": "x"},
            named(),
            400,
            "expires_after.seconds",
        ),
        (BATCH, named(content=b"x" * 20_001), 413, "file"),
        (BATCH, named(content=b"x" * 200_000), 413, "file"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, data: dict[str, str], files: dict[str, Any], status: int, param: str
) -> None:
    if files == {"x": None}:
        files = {"file": (None, b"text")}
        data = BATCH
    response = await http.post("/v1/files", data=data, files=files)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_a_body_without_a_length_is_bounded_while_it_is_read(http: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while sent < 100 << 20:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    response = await http.post(
        "/v1/files", content=endless(), headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert sent < 1 << 20


@pytest.mark.parametrize("has_length", [True, False])
async def test_an_upload_without_room_for_it_is_refused_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_length: bool
) -> None:
    """Any number of them could fill the temporary folder and that of the files, each to be refused at its end."""
    monkeypatch.setattr(file_form, "_OTHER_BYTES", 1000)
    monkeypatch.setattr(file_form, "MAX_PART_BYTES", 1000)
    gateway, client = await serve(tmp_path, max_tenant_bytes=3 * MIN_FILE_BYTES)
    assert gateway.actor is not None
    num_read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(19):
            num_read += 1000
            yield b"x" * 1000

    headers = {"content-type": "multipart/form-data; boundary=b"} | ({"content-length": "19064"} if has_length else {})
    async with client as http:
        kept = await http.post("/v1/files", data=BATCH, files=named())
        other = await gateway.actor.stored("uploads.begin", "", MIN_FILE_BYTES)
        response = await http.post("/v1/files", content=body(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "storage_full")
        assert response.json()["error"]["param"] == "file"
        assert num_read <= (0 if has_length else MIN_FILE_BYTES + 3000)
        assert (await http.delete(f"/v1/files/{kept.json()['id']}")).status_code == 200
        await gateway.actor.stored("uploads.drop", other)
        # Nothing of what was refused takes room, and what fits to the last byte does.
        whole = await http.post("/v1/files", data=BATCH, files=named(content=b"x" * 3 * MIN_FILE_BYTES))
        assert whole.status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("application/json", 415), ("multipart/form-data", 400), ("multipart/form-data; boundary=b", 400)],
)
async def test_what_is_no_form_is_refused(http: httpx.AsyncClient, content_type: str, status: int) -> None:
    response = await http.post("/v1/files", content=b"{}", headers={"content-type": content_type})
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_why_a_form_cannot_be_read_is_told(http: httpx.AsyncClient) -> None:
    files = [("file", ("a.jsonl", b"{}")), ("file", ("b.jsonl", b"{}"))]
    error = (await http.post("/v1/files", data=BATCH, files=files)).json()["error"]
    assert error["message"] == "The form could not be read: Too many files. Maximum number of files is 1."


@pytest.mark.parametrize(
    ("charset", "code"),
    [
        ("undefined", "invalid_form"),
        ("punycode", "invalid_form"),
        ('"pUnycode"', "invalid_form"),
        ("utf-8; charset=idna", "invalid_form"),
        ("none-such", "invalid_form"),
        ("UTF-8", "unsupported_value"),
        ('"iso-8859-1"', "unsupported_value"),
    ],
)
async def test_a_form_is_read_in_the_usual_charsets_only(http: httpx.AsyncClient, charset: str, code: str) -> None:
    """Fields were decoded on the event loop by any codec of Python's: in `punycode`, half a megabyte took seconds."""
    parts = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n\xff\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="\xff"\r\n\r\n{}\r\n--b--\r\n'
    )
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    response = await http.post("/v1/files", content=parts, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_an_upload_whose_actor_has_died_may_be_tried_again(tmp_path: Path) -> None:
    """It was a 400, which no client repeats, though nothing was wrong with the file."""
    gateway, client = await serve(tmp_path)
    assert gateway.actor is not None
    assert gateway.actor.store is not None

    def begun_before(*_: object) -> str:
        return uuid.uuid4().hex

    async with client as http:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gateway.actor.store.uploads, "begin", begun_before)
            response = await http.post("/v1/files", data=BATCH, files=named())
    assert (response.status_code, response.headers["retry-after"].isdigit()) == (503, True)


@pytest.mark.parametrize("method", ["write", "read"])
async def test_an_upload_waits_for_room_for_temporary_files(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A gateway whose temporary folder was full answered 500."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SpooledTemporaryFile, method, fail)
    response = await http.post("/v1/files", data=BATCH, files=named())
    assert (response.status_code, response.headers["retry-after"].isdigit()) == (503, True)
    monkeypatch.undo()
    assert (await http.post("/v1/files", data=BATCH, files=named())).status_code == 200


async def test_more_than_a_tenant_may_keep_is_refused(tmp_path: Path) -> None:
    _, client = await serve(tmp_path, max_tenant_bytes=10_000)
    async with client as http:
        assert (await http.post("/v1/files", data=BATCH, files=named(content=b"x" * 6000))).status_code == 200
        response = await http.post("/v1/files", data=BATCH, files=named(content=b"x" * 6000))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "storage_full")


async def test_a_tenant_sees_its_own_and_who_has_no_key_nothing(tmp_path: Path) -> None:
    _, client = await serve(tmp_path, RING)
    blue, red = {"x-api-key": "b"}, {"x-api-key": "r"}
    async with client as http:
        file_id = (await http.post("/v1/files", data=BATCH, files=named(), headers=blue)).json()["id"]
        assert (await http.get(f"/v1/files/{file_id}", headers=blue)).status_code == 200
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            response = await http.request(method, f"/v1/files/{file_id}{path}", headers=red)
            assert response.status_code == 404
        assert (await http.get("/v1/files", headers=red)).json()["data"] == []
        assert (await http.post("/v1/files", data=BATCH, files=named())).status_code == 401
        assert (await http.get("/v1/files")).status_code == 401


async def test_a_server_without_files_says_so(tmp_path: Path) -> None:
    gateway, client = await serve(tmp_path)
    gateway.batches = None
    async with client as http:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches")):
            response = await http.request(method, path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "batches_disabled")
