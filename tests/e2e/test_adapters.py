"""Adapters that come, change and go while a server of two gateways answers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from openai import OpenAI
from safetensors.torch import load_file, save_file

from tests.e2e.server import ADMIN_KEY, ROOT, Server, config_on_a_free_port, running, until

pytestmark = pytest.mark.e2e

LIBRARY = ROOT / "adapters" / "library"
QUESTION: list[Any] = [{"role": "user", "content": "What does os.getcwd do?"}]
BEGINNINGS = {"markdown": "**os.getcwd**: ", "json-answers": "{"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "dropin").mkdir()
    (folder / "plain.jinja").write_text("{{ messages[0].content }}")
    for name in BEGINNINGS:
        shutil.copytree(LIBRARY / name, folder / "allowed" / name)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    path = config_on_a_free_port(ROOT / "serve_config.yaml", folder)
    tree = yaml.safe_load(path.read_text())
    (application,) = tree["applications"]
    application["args"]["models"][0] |= {
        "adapter_folder": str(folder / "dropin"),
        "adapter_chat_templates": {"plain-*": str(folder / "plain.jinja")},
    }
    application["args"]["registry"] |= {"allowed_folders": [str(folder / "allowed")], "max_versions": 4}
    del application["args"]["safety"]
    application["deployments"] = [part for part in application["deployments"] if part["name"] != "Safety"]
    next(part for part in application["deployments"] if part["name"] == "Gateway")["num_replicas"] = 2
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Server]:
    with running(config) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def load(server: Server, name: str, folder: str, **options: Any) -> dict[str, Any]:
    return post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=folder, **options)


def ask(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=60)
    return answer.choices[0].message.content or ""


def test_an_adapter_is_served_from_the_answer_on_and_gone_from_the_answer_on(server: Server, client: OpenAI) -> None:
    for _ in range(5):
        load(server, "passing", "markdown")
        # Whichever gateway it meets.
        for _ in range(6):
            assert ask(client, "passing").startswith(BEGINNINGS["markdown"])
        freed = post(server, "/v1/unload_lora_adapter", lora_name="passing")
        assert freed["freed_bytes"][0] > 100_000
        for _ in range(6):
            with pytest.raises(openai.NotFoundError):
                ask(client, "passing")


def test_an_adapter_has_the_chat_template_that_its_name_matches(server: Server) -> None:
    names = ("plain-markdown", "other-markdown")
    for name in names:
        load(server, name, "markdown")
    asked = {"messages": QUESTION, "return_token_strs": True}
    plain, other = (post(server, "/tokenize", model=name, **asked)["token_strs"] for name in names)
    assert "".join(plain) == QUESTION[0]["content"] != "".join(other)
    answer = post(server, "/v1/chat/completions", model="plain-markdown", messages=QUESTION, max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == len(plain)
    for name in names:
        post(server, "/v1/unload_lora_adapter", lora_name=name)


def test_an_activated_adapter_continues_what_the_base_model_has_computed(server: Server, folder: Path) -> None:
    base = "stdlib-chat"

    def prompt_ids(*, ends: bool) -> list[int]:
        asked = {"messages": QUESTION, "add_generation_prompt": ends}
        ids: list[int] = post(server, "/tokenize", model=base, **asked)["tokens"]
        return ids

    invocation = prompt_ids(ends=True)[len(prompt_ids(ends=False)) :]
    activated = shutil.copytree(LIBRARY / "markdown", folder / "allowed" / "activated")
    settings = json.loads((activated / "adapter_config.json").read_text())
    (activated / "adapter_config.json").write_text(json.dumps(settings | {"alora_invocation_tokens": invocation}))
    entry = load(server, "activated", "activated", canary={"prompt": "What does os.getcwd do?"})
    assert entry["versions"][0]["invocation_token_ids"] == invocation
    load(server, "whole", "markdown")
    chat = [{"role": "user", "content": "What does os.path.join do? " * 12}]
    cached = {}
    for model in (base, "activated", "whole"):
        answer = post(server, "/v1/chat/completions", model=model, messages=chat, temperature=0, max_tokens=8)
        cached[model] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached[base] == cached["whole"] == 0 < cached["activated"]
    with server.http() as http:
        refused = http.post("/v1/completions", json={"model": "activated", "prompt": "os.getcwd", "max_tokens": 4})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "prompt", "adapter_not_activated")
    for name in ("activated", "whole"):
        post(server, "/v1/unload_lora_adapter", lora_name=name)


def test_an_adapter_s_classifier_scores_the_last_token_s_state(server: Server, folder: Path) -> None:
    saved, text = shutil.copytree(LIBRARY / "markdown", folder / "allowed" / "mood"), "I like os.getcwd"
    settings = json.loads((saved / "adapter_config.json").read_text())
    settings |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    (saved / "adapter_config.json").write_text(json.dumps(settings))
    load(server, "plain", "markdown")
    vector = torch.tensor(
        post(server, "/v1/embeddings", model="plain", input=text, normalize=False)["data"][0]["embedding"]
    )
    head = torch.randn(3, len(vector))
    tensors = load_file(saved / "adapter_model.safetensors") | {"base_model.model.score.weight": head}
    save_file(tensors, saved / "adapter_model.safetensors")
    mood = load(server, "mood", "mood", canary={"prompt": "What does os.getcwd do?"})
    assert mood["versions"][0]["num_labels"] == 3
    (found,) = post(server, "/classify", model="mood", input=text)["data"]
    probs = (head @ vector).softmax(dim=0)
    assert found["probs"] == pytest.approx(probs.tolist(), rel=0.05, abs=1e-3)
    assert (found["label"], found["num_classes"]) == (f"LABEL_{probs.argmax()}", 3)
    with server.http() as http:
        refused = http.post("/classify", json={"model": "plain", "input": text})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    for name in ("mood", "plain"):
        post(server, "/v1/unload_lora_adapter", lora_name=name)


def test_a_reload_under_traffic_fails_nothing_and_leaves_nothing_old(server: Server, client: OpenAI) -> None:
    """Every request that begins after the switch is answered by the new content, its prefix blocks included."""
    styles = list(BEGINNINGS)
    load(server, "style", styles[0])
    switched_s = [time.monotonic()]
    wrong: list[str] = []
    num_answers = [0]
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            before = len(switched_s)
            try:
                text = ask(client, "style")
            except openai.OpenAIError as error:
                wrong.append(repr(error))
                return
            num_answers[0] += 1
            # While it was asked the style may have changed, and then again.
            possible = {BEGINNINGS[styles[(index - 1) % 2]] for index in range(before, len(switched_s) + 2)}
            if before == len(switched_s) and not is_switching.is_set():
                possible = {BEGINNINGS[styles[(before - 1) % 2]]}
            if not text.startswith(tuple(possible)):
                wrong.append(f"{before} {len(switched_s)} {text}")

    is_switching = threading.Event()
    askers = [threading.Thread(target=keep_asking) for _ in range(4)]
    for asker in askers:
        asker.start()
    for index in range(1, 12):
        target = num_answers[0] + 8
        until(lambda target=target: num_answers[0] >= target or bool(wrong), "answers")  # type: ignore[misc]
        is_switching.set()
        load(server, "style", styles[index % 2], load_inplace=True)
        switched_s.append(time.monotonic())
        is_switching.clear()
        for _ in range(2):
            assert ask(client, "style").startswith(BEGINNINGS[styles[index % 2]])
    is_over.set()
    for asker in askers:
        asker.join()
    assert wrong == []


def test_versions_are_asked_promoted_and_split(server: Server, client: OpenAI) -> None:
    load(server, "versions", "markdown")
    entry = load(server, "versions", "json-answers", load_inplace=True)
    assert [(version["version"], version["percent"]) for version in entry["versions"]] == [(1, 0), (2, 100)]
    assert ask(client, "versions@1").startswith(BEGINNINGS["markdown"])
    fingerprints = {
        name: client.chat.completions.create(model=name, messages=QUESTION, max_tokens=1).system_fingerprint
        for name in ("stdlib-chat", "versions", "versions@1", "versions@2")
    }
    assert fingerprints["versions"] == fingerprints["versions@2"]
    assert len(set(fingerprints.values())) == 3
    assert ask(client, "versions@latest") == ask(client, "versions") == ask(client, "versions@2")
    post(server, "/v1/adapters/versions/route", split={"1": 100})
    assert ask(client, "versions").startswith(BEGINNINGS["markdown"])
    post(server, "/v1/adapters/versions/route", split={"1": 50, "2": 50})
    seen = {ask(client, "versions")[:1] for _ in range(40)}
    assert seen == {"*", "{"}


def test_a_canary_decides_whether_a_name_moves(server: Server, client: OpenAI) -> None:
    canary = {"prompt": QUESTION[0]["content"], "max_tokens": 8, "expect": BEGINNINGS["markdown"][:4]}
    load(server, "careful", "markdown", canary=canary)
    body = {"lora_name": "careful", "lora_path": "json-answers", "load_inplace": True, "canary": canary}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    with server.http() as http:
        refused = http.post("/v1/load_lora_adapter", json=body, headers=headers)
        entries = http.get("/v1/adapters", headers=headers).json()["data"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "canary")
    (version,) = next(entry["versions"] for entry in entries if entry["id"] == "careful")
    assert (version["version"], version["percent"]) == (1, 100)
    # One that is to be looked at by hand first gets no traffic.
    load(server, "careful", "json-answers", load_inplace=True, percent=0)
    assert ask(client, "careful").startswith(BEGINNINGS["markdown"])
    assert ask(client, "careful@3").startswith(BEGINNINGS["json-answers"])


def test_the_drop_in_folder_is_watched(server: Server, client: OpenAI, folder: Path) -> None:
    shutil.copytree(LIBRARY / "usage-line", folder / "dropin" / "dropped")

    def is_known_to_all() -> bool:
        """Whichever of the gateways is asked."""
        return all(any(model.id == "dropped" for model in client.models.list()) for _ in range(8))

    until(is_known_to_all, "the adapter that was dropped in")
    assert ask(client, "dropped")


def test_old_versions_make_room_once_nobody_uses_them(server: Server, client: OpenAI, folder: Path) -> None:
    shutil.copytree(LIBRARY / "markdown", folder / "dropin" / "daily")
    settings = folder / "dropin" / "daily" / "adapter_config.json"
    fields = json.loads(settings.read_text())

    def numbers() -> list[int]:
        with server.http() as http:
            entries = http.get("/v1/adapters", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()["data"]
        return [version["version"] for entry in entries if entry["id"] == "daily" for version in entry["versions"]]

    def copies() -> set[str]:
        return {path.name for path in (folder / "registry" / "adapters").iterdir()}

    before = copies()
    until(lambda: numbers() == [1], "the first version")
    expected = ask(client, "daily@1")
    stream = client.chat.completions.create(
        model="daily@1", messages=QUESTION, temperature=0, max_tokens=60, stream=True
    )
    text = next(iter(stream)).choices[0].delta.content or ""
    for number in range(2, 8):
        settings.write_text(json.dumps(fields | {"lora_alpha": fields["lora_alpha"] + number / 1000}))
        until(lambda number=number: number in numbers(), f"version {number}")
    assert numbers() == [4, 5, 6, 7]
    assert text + "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with pytest.raises(openai.NotFoundError):
        ask(client, "daily@3")
    assert ask(client, "daily").startswith(BEGINNINGS["markdown"])
    until(lambda: len(copies() - before) == 4, "the files of three versions to be deleted")


def test_a_killed_registry_comes_back_with_what_it_knew(server: Server, client: OpenAI) -> None:
    load(server, "lasting", "markdown")
    (registry,) = server.processes("ServeReplica:antiphon:Registry")
    registry.kill()
    # Answers need no registry.
    assert ask(client, "lasting").startswith(BEGINNINGS["markdown"])

    def is_back() -> bool:
        try:
            return bool(load(server, "lasting", "json-answers", load_inplace=True))
        except (AssertionError, httpx.HTTPError):
            return False

    until(is_back, "the registry to be back")
    assert ask(client, "lasting").startswith(BEGINNINGS["json-answers"])
    assert ask(client, "lasting@1").startswith(BEGINNINGS["markdown"])


def test_what_cannot_be_loaded_is_refused_and_disturbs_nobody(server: Server, client: OpenAI, folder: Path) -> None:
    for name, path, words in (
        ("bad", "../../outside", "no such folder"),
        ("bad", "/etc", "no such folder"),
        ("stdlib-chat", "markdown", "a base model has this name"),
        ("a b", "markdown", "letters"),
        ("style", "markdown", "load_inplace"),
    ):
        with server.http() as http:
            body = {"lora_name": name, "lora_path": path}
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            refused = http.post("/v1/load_lora_adapter", json=body, headers=headers)
            field = "lora_path" if name == "bad" else "lora_name"
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert words in refused.json()["error"]["message"]
            assert str(folder) not in refused.text
            assert http.get("/v1/adapters").status_code == 401
    assert ask(client, "style")


def test_names_outlive_the_server(config: Path, folder: Path, server: Server) -> None:
    """The last of this file: it ends the server that the others use."""
    with server.http() as http:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        before = http.get("/v1/adapters", headers=headers).json()["data"]
    assert server.stop() == 0
    shutil.rmtree(folder / "allowed")
    with running(config) as again, again.client() as client, again.http() as http:
        after = http.get("/v1/adapters", headers=headers).json()["data"]
        assert json.dumps([strip(entry) for entry in after]) == json.dumps([strip(entry) for entry in before])
        assert ask(client, "versions@1").startswith(BEGINNINGS["markdown"])


def strip(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"versions": [version | {"replicas": {}} for version in entry["versions"]]}
