"""Tenants with limits on a running server: who is over one is told so, what was used is known, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from openai import OpenAI

from app.access.tenants import key_digest
from tests.e2e.server import ADMIN_KEY, ROOT, Server, config_on_a_free_port, running, until

pytestmark = pytest.mark.e2e

BASE = "stdlib-chat"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two gateways and three tenants."""
    path = config_on_a_free_port(ROOT / "serve_config.yaml", tmp_path_factory.mktemp("accounts"))
    tree = yaml.safe_load(path.read_text())
    [application] = tree["applications"]
    application["args"]["tenants"] = [
        {"name": "free", "keys_sha256": [key_digest("k-free")]},
        {"name": "few", "keys_sha256": [key_digest("k-few")], "limits": {"requests_per_minute": 3}},
        {"name": "one", "keys_sha256": [key_digest("k-one")], "limits": {"concurrent_requests": 1}},
    ]
    deployments: list[dict[str, Any]] = application.setdefault("deployments", [])
    deployments[:] = [entry for entry in deployments if entry["name"] != "Gateway"]
    deployments.append({"name": "Gateway", "num_replicas": 2})
    path.write_text(yaml.safe_dump(tree))
    with running(path) as server:
        yield server


def client(server: Server, key: str) -> OpenAI:
    return server.client(api_key=key)


def say(client: OpenAI, **options: Any) -> Any:
    options = {"model": BASE, "max_tokens": 5, "temperature": 0} | options
    return client.chat.completions.create(messages=[{"role": "user", "content": "What is os.getcwd?"}], **options)


def usage(server: Server, tenant: str) -> dict[str, Any]:
    with server.http() as http:
        data = http.get(f"/admin/usage?tenant={tenant}", headers=ADMIN).json()["data"]
    names = ("num_requests", "output_tokens", "input_tokens", "num_failed")
    return {name: sum(row[name] for row in data) for name in names}


def test_a_limit_holds_over_both_gateways(guarded: Server) -> None:
    with client(guarded, "k-few") as few:
        for left in (2, 1, 0):
            response = few.chat.completions.with_raw_response.create(
                model=BASE, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
            )
            assert response.headers["x-ratelimit-limit-requests"] == "3"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        with pytest.raises(openai.RateLimitError) as refused:
            say(few)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 65
    with client(guarded, "k-free") as free:
        assert say(free).choices


def test_answers_at_once_are_bounded_and_an_end_makes_room(guarded: Server) -> None:
    with client(guarded, "k-one") as one:
        stream = say(one, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="at once"):
            say(one)
        stream.close()

        def has_room() -> bool:
            try:
                return bool(say(one).choices)
            except openai.RateLimitError:
                return False

        until(has_room, "room for another answer")


def test_what_was_used_is_known_and_no_death_loses_it(guarded: Server) -> None:
    # What other tests have used is counted before, or not at all.
    until(lambda: guarded.metric("antiphon:usage_pending") == 0, "earlier records to be stored")
    before = usage(guarded, "free")
    with client(guarded, "k-free") as free:
        answers = [say(free, extra_body={"ignore_eos": True}) for _ in range(6)]
        # All are killed at once: what the gateways have not told yet is in their spools.
        for process in [*guarded.processes("Gateway"), *guarded.processes("Accounts")]:
            os.kill(process.pid, signal.SIGKILL)
        expected = {
            "num_requests": before["num_requests"] + 6,
            "output_tokens": before["output_tokens"] + 30,
            "input_tokens": before["input_tokens"] + sum(answer.usage.prompt_tokens for answer in answers),
            "num_failed": before["num_failed"],
        }

        def is_told() -> bool:
            try:
                return usage(guarded, "free") == expected
            except (httpx.HTTPError, KeyError, ValueError):
                return False

        until(is_told, "the records of dead gateways", patience_s=120)


def test_what_was_under_way_as_its_gateway_died_is_recorded_too(guarded: Server) -> None:
    gateways, replicas = guarded.processes("Gateway"), guarded.processes("Model-")
    with client(guarded, "k-free") as free:
        stream = say(free, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        for _ in range(20):
            next(iter(stream))
        # Or else the answer might be whole by the time that the last gateway has died.
        for process in replicas:
            os.kill(process.pid, signal.SIGSTOP)
        for process in gateways:
            os.kill(process.pid, signal.SIGKILL)
        for process in replicas:
            os.kill(process.pid, signal.SIGCONT)

    def lost() -> list[str]:
        with guarded.http() as http:
            rows = http.get("/admin/usage.csv?tenant=free", headers=ADMIN).text.splitlines()
        return [row for row in rows if row.endswith("gateway_lost")]

    def is_recorded() -> bool:
        try:
            return len(lost()) == 1
        except httpx.HTTPError:
            return False

    until(is_recorded, "the record of the replica", patience_s=120)
    [row] = lost()
    # Of the columns before the durations: input, cached and output tokens.
    assert int(row.split(",")[7]) >= 20
    until(lambda: guarded.metric("vllm:num_requests_running") == 0, "the engine to let go")


def test_a_key_is_made_and_revoked_without_a_restart(guarded: Server) -> None:
    with guarded.http() as http:
        made = http.post("/admin/keys", json={"tenant": "free"}, headers=ADMIN).json()
    with client(guarded, made["key"]) as fresh:

        def is_good() -> bool:
            try:
                return all(say(fresh).choices for _ in range(6))
            except openai.AuthenticationError:
                return False

        until(is_good, "both gateways to take the key")
        with guarded.http() as http:
            assert http.delete(f"/admin/keys/{made['id']}", headers=ADMIN).json()["deleted"]

        def is_refused() -> bool:
            refused = 0
            for _ in range(6):
                try:
                    say(fresh)
                except openai.AuthenticationError:
                    refused += 1
            return refused == 6

        until(is_refused, "both gateways to refuse the key")


def test_tokens_and_refusals_are_told_by_tenant(guarded: Server) -> None:
    with client(guarded, "k-free") as free:
        say(free, max_tokens=4, extra_body={"ignore_eos": True})
    assert guarded.metric("antiphon:tokens_total", tenant="free", kind="output") >= 4
    assert guarded.metric("antiphon:requests_total", tenant="free", outcome="length") >= 1
    assert guarded.metric("antiphon:usage_lost_total") == 0


def test_records_come_as_a_sheet(guarded: Server, tmp_path: Path) -> None:
    with guarded.http() as http:
        sheet = http.get("/admin/usage.csv?tenant=few", headers=ADMIN)
    header, *rows = sheet.text.splitlines()
    assert header.startswith("record_id,tenant,model,")
    assert len(rows) == 3
