"""Batches on a running server, by OpenAI's own client: each line once, though the actor that runs them is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.server import ADMIN_KEY, Server, key_of, until

pytestmark = pytest.mark.e2e

BASE = "stdlib-chat"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture
def green(guarded: Server) -> Iterator[OpenAI]:
    with guarded.client(api_key=key_of("green")) as client:
        yield client


def lines(count: int, **body: Any) -> bytes:
    asked = {"model": BASE, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | body
    return b"".join(
        json.dumps(
            {
                "custom_id": f"line-{i}",
                "method": "POST",
                "url": CHAT,
                "body": asked | {"messages": [{"role": "user", "content": f"What is os.getcwd? {i}"}]},
            }
        ).encode()
        + b"\n"
        for i in range(count)
    )


def begin(client: OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"about": "a test"}
    )


def until_counted(client: OpenAI, batch_id: str, count: int) -> None:
    def is_counted() -> bool:
        counts = client.batches.retrieve(batch_id).request_counts
        return counts is not None and counts.completed >= count

    until(is_counted, f"{count} lines")


def until_ended(client: OpenAI, batch_id: str) -> openai.types.Batch:
    def has_ended() -> bool:
        try:
            return client.batches.retrieve(batch_id).status in ENDED
        except openai.APIError:
            return False

    until(has_ended, "the end of the batch")
    return client.batches.retrieve(batch_id)


def written(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_every_line_is_answered_once_though_the_actor_is_killed_in_the_middle(guarded: Server, green: OpenAI) -> None:
    content = lines(20)
    batch = begin(green, content)
    until_counted(green, batch.id, 3)
    [actor] = guarded.processes("ServeReplica:antiphon:Batches")
    assert actor.memory_info().rss < 250 << 20
    os.kill(actor.pid, signal.SIGKILL)
    batch = until_ended(green, batch.id)
    assert (batch.status, batch.errors, batch.error_file_id, batch.model) == ("completed", None, None, BASE)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    answers = written(green, batch.output_file_id)
    assert sorted(line["custom_id"] for line in answers) == sorted(f"line-{i}" for i in range(20))
    for line in answers:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["body"]["usage"]["completion_tokens"] == 40
    # What the same request by HTTP would have been.
    first = next(line for line in answers if line["custom_id"] == "line-0")["response"]
    asked = json.loads(content.splitlines()[0])["body"]
    alone = green.post("/chat/completions", body=asked, cast_to=object)
    assert first["body"]["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]  # type: ignore[index]
    # The tenant has used it: once each, and what was under way as the actor died perhaps twice.
    with guarded.http() as http:

        def is_recorded() -> bool:
            usage = http.get("/admin/usage?tenant=green", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()
            return 21 <= sum(row["num_requests"] for row in usage["data"]) <= 25

        until(is_recorded, "the usage records")
        timeline = http.get(f"/requests/{first['request_id']}", headers={"authorization": f"Bearer {key_of('green')}"})
        assert timeline.status_code == 200


def test_a_batch_is_cancelled_and_its_files_are_deleted(green: OpenAI) -> None:
    batch = begin(green, lines(40, max_tokens=200))
    until_counted(green, batch.id, 1)
    with pytest.raises(openai.BadRequestError, match="unfinished"):
        green.files.delete(batch.input_file_id)
    assert green.batches.cancel(batch.id).status == "cancelling"
    batch = until_ended(green, batch.id)
    assert batch.status == "cancelled"
    answers, rest = written(green, batch.output_file_id), written(green, batch.error_file_id)
    assert len(answers) >= 1
    assert sorted(line["custom_id"] for line in answers + rest) == sorted(f"line-{i}" for i in range(40))
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    assert batch.id in [found.id for found in green.batches.list(limit=1)]
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        assert green.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            green.files.retrieve(file_id)


def test_a_bad_input_is_told_and_others_see_nothing(guarded: Server, green: OpenAI) -> None:
    batch = until_ended(green, begin(green, lines(1) + lines(1)).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or []] == [(2, "duplicate_custom_id")]
    with guarded.client(api_key=key_of("white")) as white:
        with pytest.raises(openai.NotFoundError):
            white.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            white.files.content(batch.input_file_id)
        assert [*white.files.list(), *white.batches.list()] == []


def test_a_large_file_comes_and_goes_whole(green: OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"0123456789abcdef" * (1 << 20))
    with path.open("rb") as content:
        file = green.files.create(
            file=content, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (file.bytes, file.filename, file.expires_at) == (16 << 20, "large.jsonl", file.created_at + 3600)
    assert green.files.content(file.id).content == path.read_bytes()
    assert file.id in [found.id for found in green.files.list(purpose="batch", order="asc", limit=1)]
    green.files.delete(file.id)
