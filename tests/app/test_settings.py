from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from app.settings import ChannelSettings, RegistrySettings, Settings
from app.settings_classifiers import RerankerSettings, SafetySettings
from app.settings_engine import EngineSettings
from app.settings_node import SettingsNode
from deployments.config import ChannelConfig, RegistryConfig, RerankerConfig, SafetyConfig
from engine.config import EngineConfig

MODEL = {"name": "base", "path": "models/base"}


def nodes() -> list[type[SettingsNode]]:
    return SettingsNode.__subclasses__()


def test_the_least_configuration_is_one_model() -> None:
    settings = Settings.model_validate({"models": [MODEL]})
    assert settings.models[0].engine == EngineSettings()
    assert settings.safety is None


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models below it were missing, and the state went to a folder named `~` where the server had started."""
    monkeypatch.setenv("HOME", "/home/ada")
    model = MODEL | {"path": "~/base", "adapters": [{"name": "a", "path": "~/a"}], "engine": {"kv_disk_folder": "~/kv"}}
    registry = {"folder": "~/state", "cache_folder": "~/cache"}
    settings = Settings.model_validate({"models": [model], "registry": registry})
    (read,) = settings.models
    assert (read.path, read.adapters[0].path, read.engine.kv_disk_folder) == (
        "/home/ada/base",
        "/home/ada/a",
        "/home/ada/kv",
    )
    assert settings.registry is not None
    assert (settings.registry.folder, settings.registry.cache_folder) == ("/home/ada/state", "~/cache")


def test_every_field_has_a_sentence() -> None:
    for node in nodes():
        for name, field in node.model_fields.items():
            assert (field.description or "").endswith("."), (node, name)


def test_engine_and_safety_settings_mirror_what_they_become() -> None:
    engine = {
        field.name: field.default
        for field in dataclasses.fields(EngineConfig)
        if field.name not in ("model_path", "tokenizer_path")
    }
    # An engine by itself lets everybody wait; a server that nobody has configured does not.
    assert EngineSettings().model_dump() == engine | {"max_queue_s": None}
    safety = {field.name for field in dataclasses.fields(SafetyConfig)} - {"model_path"}
    assert set(SafetySettings.model_fields) - {"name", "path", "placement"} == safety
    ours = SafetySettings(path="x").model_dump()
    theirs = dataclasses.asdict(SafetyConfig(model_path="x"))
    assert {name: ours[name] for name in safety} == {name: theirs[name] for name in safety}


@pytest.mark.parametrize(
    ("settings", "config"),
    [(RerankerSettings, RerankerConfig), (ChannelSettings, ChannelConfig), (RegistrySettings, RegistryConfig)],
)
def test_a_default_is_the_same_in_settings_and_in_what_they_become(
    settings: type[SettingsNode], config: type[Any]
) -> None:
    theirs = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    ours = {name: field.default for name, field in settings.model_fields.items() if not field.is_required()}
    shared = theirs.keys() & ours.keys()
    assert len(shared) >= 4
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"models": [MODEL | {"egnine": {}}]}, "unknown key 'egnine'; did you mean 'engine'?"),
        ({"models": [MODEL], "saftey": None}, "unknown key 'saftey'; did you mean 'safety'?"),
        ({"models": [MODEL | {"engine": {"max_seqs": 1}}]}, "did you mean 'max_num_seqs'?"),
        ({"models": []}, "at least one base model"),
        ({"models": [MODEL, MODEL]}, "must be unique: base"),
        ({"models": [MODEL], "rerankers": [{"name": "base", "path": "x"}]}, "must be unique: base"),
        ({"models": [MODEL | {"adapters": [{"name": "base", "path": "x"}]}]}, "must be unique: base"),
        ({"models": [{"name": "../x", "path": "x"}]}, "String should match pattern"),
        ({"models": [MODEL | {"engine": {"max_num_seqs": 0}}]}, "greater than or equal to 1"),
        *(
            ({"models": [MODEL | {"engine": {name: 10**9}}]}, "less than or equal to")
            for name in ("num_threads", "max_num_seqs", "max_batched_tokens", "max_adapter_rank", "block_tokens")
        ),
        # As many tasks are started for each batch.
        ({"models": [MODEL], "batches": {"max_concurrent_requests": 10**9}}, "less than or equal to"),
        ({"models": [MODEL | {"engine": {"gpu_memory_fraction": float("nan")}}]}, "finite number"),
        ({"models": [MODEL], "safety": {"path": "x", "window_chars": 9, "overlap_chars": 9}}, "must be smaller"),
        (
            {"models": [MODEL], "safety": {"path": "x", "max_chars": 9}},
            "window_chars (200) must be at most max_chars (9)",
        ),
        ({"models": [MODEL], "allowed_origins": ["*"]}, "any web page send requests"),
        *(
            ({"models": [MODEL], "allowed_origins": [origin]}, "String should match pattern")
            for origin in (
                "https://a.example/",
                "https://a.example/x",
                "a.example",
                "https://A.example",
                "https://*.b",
                "",
            )
        ),
        *(
            ({"models": [MODEL], "registry": {"sources": [prefix]}}, "String should match pattern")
            for prefix in ("s3://bucket", "s3://", "https://", "https://a@b/", "file:///etc/", "memory://", "org/", "")
        ),
    ],
)
def test_mistakes_are_refused_with_a_hint(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        Settings.model_validate(args)
    assert text in str(wrong.value)


@pytest.mark.parametrize(
    "args",
    [
        {"allowed_origins": ["https://a.example", "http://localhost:3000", "https://[::1]:8443"]},
        {"allowed_origins": ["*"], "allow_anonymous": True},
        {"allowed_origins": ["*"], "tenants": [{"name": "a", "keys_sha256": ["a" * 64]}]},
    ],
)
def test_pages_may_ask_by_name_and_all_of_them_where_keys_or_a_word_allow_it(args: dict[str, Any]) -> None:
    assert Settings.model_validate({"models": [MODEL]} | args).allowed_origins


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"models": [MODEL]}).max_resumes = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "tenants",
    [
        [{"name": "a", "keys_sha256": ["a" * 64]}, {"name": "a", "keys_sha256": ["b" * 64]}],
        [{"name": "a", "keys_sha256": ["a" * 64]}, {"name": "b", "keys_sha256": ["a" * 64]}],
        [{"name": "a", "keys_sha256": ["a" * 64, "a" * 64]}],
        [{"name": "a", "keys_sha256": ["secret"]}],
        [{"name": "a b", "keys_sha256": ["a" * 64]}],
    ],
)
def test_tenants_have_names_and_keys_of_their_own(tenants: list[dict[str, object]]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"models": [{"name": "m", "path": "m"}], "tenants": tenants})
