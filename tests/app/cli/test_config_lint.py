from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from app.cli.config_lint import deployment_names, lint_config
from app.resolved import accounts_config
from app.settings import Settings
from deployments.database import sqlite_folder
from engine.loading import fingerprint
from tests.architecture.source_tree import ROOT
from tests.deployments.tiny_models import write_tokenizer
from tests.engine.checkpoint_folder import write_checkpoint

GOOD = """
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: default
    route_prefix: /
    import_path: app.builder:build
    args:
      models:
        - {name: base, path: FOLDER}
    deployments:
      - {name: Gateway, num_replicas: 2, ray_actor_options: {num_cpus: 1}}
      - {name: Model-base, autoscaling_config: {min_replicas: 1, max_replicas: 2}}
"""

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file."""


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    return Lint(tmp_path)


def good_config(folder: Path) -> str:
    """Return a config file that is good, and put a checkpoint that it names in a folder."""
    write_checkpoint(folder, vocab_size=write_tokenizer(folder))
    return GOOD.replace("FOLDER", str(folder))


class Lint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *changes: tuple[str, str]) -> list[str]:
        text = good_config(self.folder)
        for old, new in changes:
            old, new = (part.replace("FOLDER", str(self.folder)) for part in (old, new))
            assert old in text
            text = text.replace(old, new)
        path = self.folder / "config.yaml"
        path.write_text(text)
        return lint_config(path)


def test_a_good_file_has_no_mistakes(lint: Lint) -> None:
    assert lint() == []
    assert lint(("port: 8000", "request_timeout_s: 0.5, keep_alive_timeout_s: 0")) == []
    assert lint(("port: 8000", "request_timeout_s: null")) == []


def test_scaling_is_checked_with_the_defaults_that_serve_gives_it(lint: Lint) -> None:
    """Without `max_replicas` there is at most one replica, and with `num_replicas: auto` there are up to 100."""
    bounds = "{min_replicas: 1, max_replicas: 2}"
    [line] = lint((bounds, "{min_replicas: 2}"))
    assert line.startswith("applications[0].deployments[1].autoscaling_config: max_replicas (1) must be greater")
    assert lint((bounds, "{min_replicas: 2}, num_replicas: auto")) == []
    [line] = lint((bounds, "{min_replicas: 200}, num_replicas: auto"))
    assert line.startswith("applications[0].deployments[1].autoscaling_config: max_replicas (100) must be greater")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("http_options:", "http_option:", "http_option: unknown key; did you mean 'http_options'?"),
        ("port:", "prot:", "http_options.prot: unknown key; did you mean 'port'?"),
        ("port: 8000", "port: abc", "http_options.port: input should be a valid integer"),
        ("route_prefix", "route_prefx", "applications[0].route_prefx: unknown key; did you mean 'route_prefix'?"),
        ("models:", "modles:", "applications[0].args.modles: unknown key; did you mean 'models'?"),
        ("{name: base, path", "{nme: base, path", "applications[0].args.models[0].nme: unknown key; did you mean"),
        ("{name: base, ", "{", "applications[0].args.models[0].name: is missing"),
        ("\n        - {name: base, path: FOLDER}", " base", "applications[0].args.models: must be a list"),
        ("{name: base, path", "base #{", "applications[0].args.models[0]: must be a mapping of keys to values"),
        ("num_replicas: 2", "num_replica: 2", "applications[0].deployments[0].num_replica: unknown key; did you mean"),
        ("num_cpus", "num_cpu", "applications[0].deployments[0].ray_actor_options.num_cpu: unknown key"),
        ("max_replicas", "max_replica", "applications[0].deployments[1].autoscaling_config.max_replica: unknown key"),
        ("name: Gateway", "name: Gatway", "applications[0].deployments[0].name: no deployment 'Gatway'; did you mean"),
        ("Model-base", "Model-bas", "applications[0].deployments[1].name: no deployment 'Model-bas'; did you mean"),
        ("name: Gateway", "name: Accounts", "applications[0].deployments[0].num_replicas: 'Accounts' must have"),
        ("max_replicas: 2", "max_replicas: 0", "applications[0].deployments[1].autoscaling_config.max_replicas: input"),
        ("min_replicas: 1", "min_replicas: 3", "applications[0].deployments[1].autoscaling_config: max_replicas (2)"),
        ("name: Model-base", "name: Gateway", "applications[0].deployments[1].name: 'Gateway' is declared twice;"),
        ("port: 8000", "port: -1", "http_options.port: -1 is not between 1 and 65535"),
        ("port: 8000", "port: 0", "http_options.port: 0 is not between 1 and 65535"),
        ("port: 8000", "port: 70000", "http_options.port: 70000 is not between 1 and 65535"),
        ("route_prefix: /", "route_prefix: api", "applications[0].route_prefix: 'api' must be '/', or a path"),
        ("route_prefix: /", "route_prefix: /api/", "applications[0].route_prefix: '/api/' must be '/', or a path"),
        ("route_prefix: /", "route_prefix: null", "applications[0].route_prefix: must be set"),
        ("name: Gateway", "name: Safety", "applications[0].deployments[0].name: no deployment 'Safety'; known are:"),
        ("name: Gateway,", "name: [],", "applications[0].deployments[0].name: input should be a valid string"),
        ("    deployments:", "    deployments:\n      - Gateway", "applications[0].deployments[0]: must be a mapping"),
        ("max_replicas: 2", "policy: {x: 1}", "applications[0].deployments[1].autoscaling_config.policy.x: unknown"),
        ("max_replicas: 2", "policy: {policy_function: 'no:f'}", "applications[0].deployments[1].autoscaling_config: "),
        ("http_options:", "grpc_options: {prt: 9}\nhttp_options:", "grpc_options.prt: unknown key; did you mean 'port"),
        ("http_options:", "proxy_location: Disabled\nhttp_options:", "proxy_location: must not be 'Disabled'; without"),
        ("http_options:", "target_capacity: 0\nhttp_options:", "target_capacity: must be above 0"),
        ("port: 8000", "port: 8000, ssl_certfile: a, ssl_keyfile: b", "http_options.ssl_certfile: TLS is not sup"),
        ("name: default", "name: a/b", "applications[0].name: 'a/b' must have no '/'"),
        ("port: 8000", "request_timeout_s: 0", "http_options.request_timeout_s: must be above 0, not 0: every request"),
        ("port: 8000", "request_timeout_s: '-1'", "http_options.request_timeout_s: must be above 0, not -1"),
        ("port: 8000", "keep_alive_timeout_s: -1", "http_options.keep_alive_timeout_s: must be at least 0"),
        ("route_prefix: /", "route_prefix: '/a?b'", "applications[0].route_prefix: '/a?b' must be '/', or a path"),
        ("path: FOLDER", 'path: "a\\0b"', "applications[0].args.models[0].path: string should match pattern"),
        ("FOLDER}", "FOLDER, engine: {max_queued_requests: 2147483648}}", "applications[0].args.models[0].engine.max_"),
        ("FOLDER}", "FOLDER, engine: {kv_disk_bytes: 2000000000000000}}", "applications[0].args.models[0].engine.kv_d"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_with_its_place(lint: Lint, old: str, new: str, line: str) -> None:
    lines = lint((old, new))
    assert any(found.startswith(line) for found in lines), lines
    assert all("\n" not in found for found in lines)


@pytest.mark.parametrize(
    ("options", "is_good"), [("{num_cpus: 4}", False), ("{num_cpus: 4, num_gpus: 0}", False), ("{num_gpus: 0.5}", True)]
)
def test_a_replica_on_a_gpu_asks_for_one(lint: Lint, options: str, is_good: bool) -> None:
    """Serve takes these options in place of those that the builder gives, not beside them."""
    on_gpu = ("FOLDER}", "FOLDER, engine: {device: cuda}}")
    assert lint(on_gpu) == []
    lines = lint(on_gpu, ("{name: Model-base,", f"{{name: Model-base, ray_actor_options: {options},"))
    expected = "applications[0].deployments[1].ray_actor_options: num_gpus is missing"
    assert [line.split(";")[0] for line in lines] == ([] if is_good else [expected])


def test_a_replica_that_computes_on_a_cpu_asks_for_no_gpu(lint: Lint) -> None:
    """It held one and left it idle, or waited a quarter of an hour for one."""
    lines = lint(("{name: Model-base,", "{name: Model-base, ray_actor_options: {num_gpus: 1},"))
    assert lines == [
        "applications[0].deployments[1].ray_actor_options.num_gpus: the model's engine.device is 'cpu', which leaves "
        "the GPU idle; set it to 'cuda'"
    ]


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("FOLDER}", "FOLDER, engine: {max_model_len: 99999}}", "args.models[0].engine.max_model_len", "over the check"),
        (
            "FOLDER}",
            "FOLDER, adapters: [{name: a, path: FOLDER}]}",
            "args.models[0].adapters[0]",
            "adapter_config.json",
        ),
        ("app.builder:build", "app.nope:build", "import_path", "did you mean 'app.builder:build'?"),
        ("app.builder:build", "nowhere:app", "import_path", "module 'nowhere' not found"),
    ],
)
def test_what_cannot_start_is_a_mistake_beforehand(lint: Lint, old: str, new: str, place: str, words: str) -> None:
    (line,) = lint((old, new))
    assert line.startswith(f"applications[0].{place}: ")
    assert words in line


@pytest.mark.parametrize(("old", "new"), [("host: 127.0.0.1, ", ""), ("host: 127.0.0.1", "host: 10.0.0.5")])
def test_a_server_that_anybody_could_ask_is_a_mistake(lint: Lint, old: str, new: str) -> None:
    (line,) = lint((old, new))
    assert line.startswith("http_options.host: anyone who can reach ")


def test_a_key_that_stands_twice_is_a_mistake(lint: Lint) -> None:
    (line,) = lint(("port: 8000", "port: 8000, port: 8001"))
    assert line.endswith("line 2, column 45: not valid YAML: duplicate key 'port'")


def test_a_folder_that_is_not_there_is_named(lint: Lint, tmp_path: Path) -> None:
    lines = lint((f"path: {tmp_path}", f"path: {tmp_path}/nope"))
    assert lines == [f"applications[0].args.models[0].path: the folder '{tmp_path}/nope' does not exist"]


def test_a_drop_in_folder_is_no_hub_id(lint: Lint, tmp_path: Path) -> None:
    """It would be downloaded from there: a stranger's files, if it exists."""
    lines = lint((f"path: {tmp_path}", f"path: {tmp_path}, adapter_folder: adapters-of-nobody/here"))
    place = "applications[0].args.models[0].adapter_folder"
    assert lines == [f"{place}: the folder 'adapters-of-nobody/here' does not exist"]


def forbid(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, beginning: str) -> None:
    """Let a function of a module say of paths with a beginning what the system says to who is not root."""
    call = getattr(module, name, open)

    def refuse(path: object, *args: object, **kwargs: object) -> object:
        if str(path).startswith(beginning):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return call(path, *args, **kwargs)

    monkeypatch.setattr(module, name, refuse, raising=False)


def test_folders_that_this_user_may_not_look_into_are_named(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended in a traceback."""
    locked = lint.folder / "locked"
    locked.mkdir()
    for name in ("stat", "scandir"):
        forbid(monkeypatch, os, name, f"{locked}/")
    (line,) = lint(("path: FOLDER}", "path: FOLDER/locked/model, tokenizer_path: FOLDER}"))
    assert line == f"applications[0].args.models[0].path: the folder '{locked}/model' cannot be read: Permission denied"
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked)
    (line,) = lint(("    deployments:", "      registry: {folder: FOLDER/locked/state}\n    deployments:"))
    assert line == f"applications[0].args.registry.folder: '{locked}' is not a writable folder"


def test_what_a_server_of_another_user_has_left_is_named(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server started, and batches were "not ready yet" for ever."""
    state = lint.folder / "state"
    state.mkdir()
    (state / "lock").touch()
    changes = ("    deployments:", "      batches: {folder: FOLDER/state}\n    deployments:")
    assert lint(changes) == []
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).parent != state)
    assert lint(changes) == [f"applications[0].args.batches.folder: '{state}/lock' is not writable"]


def test_weights_that_this_user_may_not_read_are_named(lint: Lint, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = f"{lint.folder}/model.safetensors"
    forbid(monkeypatch, fingerprint, "open", weights)
    assert lint() == [f"applications[0].args.models[0].path: {weights} cannot be read: Permission denied"]


def test_a_file_that_serves_nothing_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("applications: []")
    assert lint_config(tmp_path / "config.yaml") == ["applications: must contain at least one application"]


def test_weights_that_are_missing_or_cut_off_are_named(lint: Lint) -> None:
    """A start read them after 20 seconds only, and told of it by a traceback."""
    lint()
    write_tokenizer(lint.folder / "guard")
    (lint.folder / "guard" / "config.json").write_text("{}")
    (lint.folder / "guard" / "model.safetensors").write_bytes(NO_TENSORS[:-1])
    safety = "      safety: {path: FOLDER/guard}\n"
    (cut,) = lint(("    deployments:", f"{safety}    deployments:"))
    assert cut.startswith(f"applications[0].args.safety.path: {lint.folder}/guard/model.safetensors: not a complete")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    shards = lint.folder / "shards"
    shards.mkdir()
    shutil.copy(lint.folder / "config.json", shards)
    (shards / "model-1-of-2.safetensors").write_bytes(NO_TENSORS)
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    (missing,) = lint(("path: FOLDER}", "path: FOLDER/shards, tokenizer_path: FOLDER}"))
    assert missing.startswith(f"applications[0].args.models[0].path: {shards}/model.safetensors.index.json: it names")


def test_a_classifier_without_a_head_or_a_named_label_is_named(lint: Lint) -> None:
    """The deployment found it only when the server started."""
    lint()
    for name, tensor in (("encoder", "bert.pooler.dense.weight"), ("guard", "classifier.weight")):
        write_tokenizer(lint.folder / name)
        (lint.folder / name / "config.json").write_text('{"id2label": {"0": "hate"}}')
        save_file({tensor: np.zeros((1, 1))}, lint.folder / name / "model.safetensors")

    def found(parts: str) -> list[str]:
        return lint(("    deployments:", f"      {parts}\n    deployments:"))

    assert found("safety: {path: FOLDER/guard, benign_labels: [hate]}") == []
    assert found("rerankers: [{name: judge, path: FOLDER/guard}]") == []
    headless = f"{lint.folder}/encoder: not a classifier's checkpoint: it has no classification head."
    assert found("safety: {path: FOLDER/encoder}") == [f"applications[0].args.safety.path: {headless}"]
    (line,) = found("rerankers: [{name: judge, path: FOLDER/encoder}]")
    assert line == f"applications[0].args.rerankers[0].path: {headless}"
    for field, label in (("benign_labels", "[safe]"), ("threshold_by_hazard", "{safe: 0.5}")):
        (line,) = found(f"safety: {{path: FOLDER/guard, {field}: {label}}}")
        assert line == f"applications[0].args.safety.{field}: the classifier has no label 'safe'; it has hate"
    (lint.folder / "guard" / "config.json").write_text('{"id2label": {"0": "hate"}, "problem_type": "regression"}')
    (line,) = found("safety: {path: FOLDER/guard}")
    assert line.startswith(f"applications[0].args.safety.path: {lint.folder}/guard/config.json: problem_type is")
    assert found("rerankers: [{name: judge, path: FOLDER/guard}]") == []
    (lint.folder / "guard" / "config.json").write_text('{"id2label": {"0": "hate"}, "model_type": "bert"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (lint.folder / "guard" / name).unlink()
    for part, place in (
        ("safety: {path: FOLDER/guard}", "safety"),
        ("rerankers: [{name: a, path: FOLDER/guard}]", "rerankers[0]"),
    ):
        (line,) = found(part)
        assert line.startswith(f"applications[0].args.{place}.path: {lint.folder}/guard: the tokenizer has no")


def test_a_checkpoint_whose_files_do_not_fit_together_is_named(lint: Lint) -> None:
    """All of it was found only as the server started."""
    lint()
    other = lint.folder / "other"
    other.mkdir()
    wider = json.loads((lint.folder / "config.json").read_text()) | {"vocab_size": 1000}
    (other / "config.json").write_text(json.dumps(wider))
    shutil.copy(lint.folder / "model.safetensors", other)
    (shape,) = lint(("path: FOLDER}", "path: FOLDER/other, tokenizer_path: FOLDER}"))
    assert shape.startswith(f"applications[0].args.models[0].path: {other}: the tensor model.embed_tokens.weight has")
    (tokenizer,) = lint(("path: FOLDER}", "path: FOLDER, tokenizer_path: FOLDER/other}"))
    assert tokenizer == f"applications[0].args.models[0].tokenizer_path: {other}: there is no tokenizer.json"


def test_a_folder_that_cannot_be_written_is_named(lint: Lint) -> None:
    """Batches would be "not ready yet" for ever, and usage records stay in memory."""
    for node, key in (("registry", "folder"), ("accounts", "spool_folder"), ("batches", "folder")):
        folder = f"      {node}: {{{key}: FOLDER/config.json/state}}\n    deployments:"
        (line,) = lint(("    deployments:", folder))
        place = f"applications[0].args.{node}.{key}"
        assert line == f"{place}: '{lint.folder}/config.json' is not a writable folder"


def test_a_disk_tier_needs_a_folder(lint: Lint) -> None:
    """The replica found it only when it started."""
    place = "applications[0].args.models[0].engine.kv_disk_folder"
    tier = "engine: {kv_disk_bytes: 100000000, kv_disk_folder: FOLDER/config.json}"
    (line,) = lint(("FOLDER}", f"FOLDER, {tier}}}"))
    assert line == f"{place}: '{lint.folder}/config.json' is not a writable folder"
    assert lint(("FOLDER}", f"FOLDER, {tier.replace('config.json', 'kv')}}}")) == []


@pytest.mark.parametrize(
    ("field", "url", "words"),
    [
        ("limits_url", "foo://h", "unknown storage scheme"),
        ("database_url", "sqlite:////dev/null/usage.sqlite", "'/dev/null' is not a writable folder"),
    ],
)
def test_stores_that_the_accounts_cannot_open_are_named(lint: Lint, field: str, url: str, words: str) -> None:
    """The actor found them only when the server started."""
    (line,) = lint(("    deployments:", f"      accounts: {{{field}: '{url}'}}\n    deployments:"))
    assert line.startswith(f"applications[0].args.accounts.{field}: ")
    assert words in line


def test_two_applications_have_folders_of_their_own(lint: Lint) -> None:
    assert lint() == []
    path = lint.folder / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    (first,) = tree["applications"]
    tree["applications"].append(first | {"name": "second", "route_prefix": "/second"})
    path.write_text(yaml.safe_dump(tree))
    assert lint_config(path) == [
        "applications[1].args.registry.folder: '.antiphon' is already used by applications[0]",
        "applications[1].args.batches.folder: '.antiphon/batches' is already used by applications[0]",
    ]


def test_a_value_of_no_type_that_it_may_have_is_one_mistake(lint: Lint) -> None:
    (line,) = lint(("num_replicas: 2", "num_replicas: -1"))
    assert line.startswith("applications[0].deployments[0].num_replicas: input should be greater than")


def test_a_classifier_of_several_labels_is_no_cross_encoder(lint: Lint) -> None:
    folder = lint.folder / "guard"
    write_tokenizer(folder)
    rerankers = f"      rerankers: [{{name: judge, path: {folder}}}]\n"
    for labels, num_labels in (({"id2label": {"0": "x", "1": "y", "2": "z"}}, 3), ({}, 2), ({"num_labels": 4}, 4)):
        (folder / "config.json").write_text(json.dumps(labels))
        assert lint(("    deployments:", f"{rerankers}    deployments:")) == [
            f"applications[0].args.rerankers[0].path: a cross-encoder has one label, and this one {num_labels}"
        ]


def test_text_that_means_no_opens_no_server(lint: Lint) -> None:
    """A text of some letters was taken for a yes here, and for a no by the server, which then served anyone."""
    (line,) = lint(("host: 127.0.0.1", "host: 0.0.0.0"), ("    args:", "    args:\n      allow_anonymous: 'no'"))
    assert line.startswith("http_options.host: anyone who can reach 0.0.0.0")


def test_no_path_is_only_one_mistake(lint: Lint) -> None:
    lines = lint(("import_path: app.builder:build", "import_path: null"))
    assert lines == ["applications[0].import_path: input should be a valid string"]


@pytest.mark.parametrize("more", ["allow_anonymous: true", f"tenants: [{{name: a, keys_sha256: [{'a' * 64}]}}]"])
def test_a_server_for_others_knows_them_or_says_that_it_is_open(lint: Lint, more: str) -> None:
    assert lint(("host: 127.0.0.1", "host: 0.0.0.0"), ("    args:", f"    args:\n      {more}")) == []


def test_a_key_may_stand_in_a_reference_and_beside_it(lint: Lint) -> None:
    changes = (
        ("{name: Gateway, num_replicas: 2", "&first {name: Gateway, num_replicas: 2"),
        (
            "{name: Model-base,",
            "{<<: *first, name: Model-base, num_replicas: 1,",
        ),
    )
    assert not any("duplicate" in line for line in lint(*changes))


def test_a_hub_id_is_no_missing_folder(lint: Lint, tmp_path: Path) -> None:
    assert lint((f"path: {tmp_path}", "path: some-org/some-model")) == []


def test_all_mistakes_are_told_at_once(lint: Lint) -> None:
    assert len(lint(("port:", "prot:"), ("num_cpus", "num_cpu"), ("models:", "modles:"))) == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [1", "not valid YAML"),
        (b"- a", "must be a mapping"),
        (b"", "must be a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"applications: 5", "applications"),
        (b"a: " + b"[" * 9000, "nested too deeply"),
        (b"a: \x07", "not valid YAML: unacceptable character"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_what_is_no_config_is_one_line(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    lines = lint_config(path)
    assert lines
    assert text in lines[0]
    assert "\n" not in lines[0]


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert lint_config(tmp_path / "nope.yaml") == [f"{tmp_path}/nope.yaml: cannot be read: No such file or directory"]


def test_deployments_follow_the_settings() -> None:
    args = {"models": [{"name": "a", "path": "x"}], "safety": {"path": "y"}}
    singles = ["Registry", "Accounts", "Batches"]
    assert deployment_names(Settings.model_validate(args)) == ["Gateway", "Model-a", "Tokenizer", "Safety", *singles]
    args |= {"rerankers": [{"name": "r", "path": "z"}]}
    assert "Reranker-r" in deployment_names(Settings.model_validate(args))
    args |= {"rerankers": [], "safety": {"path": "y", "placement": "inline"}, "tokenizer": {"placement": "inline"}}
    args |= {"registry": None, "accounts": None, "batches": None, "rerankers": []}
    assert deployment_names(Settings.model_validate(args)) == ["Gateway", "Model-a"]


def test_a_start_is_not_held_up_by_adapters_that_it_will_read_anyway(lint: Lint) -> None:
    (lint.folder / "broken").mkdir()
    (found,) = lint(("path: FOLDER}", "path: FOLDER, adapters: [{name: a, path: FOLDER/broken}]}"))
    assert "args.models[0].adapters[0]" in found
    assert lint_config(lint.folder / "config.yaml", reads_all=False) == []


def kubernetes_service() -> dict[str, Any]:
    service, *_ = yaml.safe_load_all((ROOT / "examples/kubernetes/rayservice.yaml").read_text())
    return dict(service["spec"])


def test_what_the_manifest_for_kubernetes_configures_is_good(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    # The image has the repository there.
    config.write_text(kubernetes_service()["serveConfigV2"].replace("/opt/antiphon", str(ROOT)))
    assert lint_config(str(config)) == []


def test_the_manifest_for_kubernetes_keeps_what_must_outlive_a_pod_on_its_volume() -> None:
    """Usage and keys lay in the head's own file system, and were lost with its pod."""
    service = kubernetes_service()
    [head] = service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    [mount] = head["volumeMounts"]
    args = yaml.safe_load(service["serveConfigV2"])["applications"][0]["args"]
    settings = Settings.model_validate(args)
    assert settings.registry is not None
    assert settings.accounts is not None
    assert settings.batches is not None
    database = sqlite_folder(accounts_config(settings.accounts).database_url)
    for folder in (settings.registry.folder, settings.batches.folder, database):
        assert Path(folder or "").is_relative_to(mount["mountPath"])
