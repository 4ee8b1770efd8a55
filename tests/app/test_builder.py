"""From settings to bound deployments, on real checkpoints of a few kilobytes; nothing is started."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from ray.experimental import internal_kv
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from adapters.identity import AdapterRef
from adapters.registry import reference_in
from app import builder, declared_adapters
from app.access.tenants import ADMIN_KEY_VARIABLE, key_digest
from app.builder import _request_router, build
from app.resolved import _remembered, batches_config, gateway_config, registry_config
from app.settings import Settings
from app.settings_check import mistakes
from deployments.config import ChannelConfig
from deployments.tokenizer.tokenizer import ENCODE_TIMEOUT_S
from engine.errors import ConfigError
from tests.deployments.tiny_models import CONTEXT, write_chat_model, write_cross_encoder, write_guard


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with two adapters, and a guard."""
    folder = tmp_path_factory.mktemp("models")
    write_chat_model(folder / "chat")
    write_guard(folder / "guard")
    for name, rank in (("small", 2), ("large", 8)):
        base = AutoModelForCausalLM.from_pretrained(folder / "chat")
        get_peft_model(base, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"])).save_pretrained(
            folder / "adapters" / name
        )
    return folder


def settings(folder: Path, *, engine: dict[str, Any] | None = None, **fields: Any) -> Settings:
    model = {"name": "chat", "path": str(folder / "chat"), "adapter_folder": str(folder / "adapters")}
    return Settings.model_validate({"models": [model | {"engine": engine or {}}]} | fields)


def test_what_the_files_say_reaches_every_deployment(folder: Path) -> None:
    config = gateway_config(settings(folder, safety={"path": str(folder / "guard"), "threshold": 0.25}))
    (model,) = config.models
    assert (model.name, model.max_model_len, model.tokenizer_path) == ("chat", CONTEXT, str(folder / "chat"))
    assert [ref.name for ref in model.adapters] == ["large", "small"]
    assert config.safety is not None
    assert config.safety.threshold == 0.25
    assert len(config.channel.secret) == 32


def test_chat_templates_are_read_from_their_files(folder: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jinja" for name in ("all", "small")}
    for name, file in files.items():
        file.write_text(name)
    fields = {
        "name": "chat",
        "path": str(folder / "chat"),
        "chat_template": str(files["all"]),
        "adapter_chat_templates": {"small*": str(files["small"])},
    }
    (model,) = gateway_config(Settings.model_validate({"models": [fields]})).models
    assert (model.chat_template, model.template_by_pattern) == ("all", {"small*": "small"})
    files["small"].write_text("{% if %}")
    (told,) = mistakes(Settings.model_validate({"models": [fields]}), reads_all=False)
    assert told.startswith("args.models[0].adapter_chat_templates.small*:")


@pytest.mark.parametrize(("asked", "expected"), [("model", {"temperature": 0.6}), ("openai", {})])
def test_a_model_is_sampled_as_its_makers_say_unless_nobody_wants_that(
    asked: str, expected: dict[str, float], folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "chat", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    model = {"name": "chat", "path": str(tmp_path), "sampling_defaults": asked}
    (config,) = gateway_config(Settings.model_validate({"models": [model]})).models
    assert config.sampling == expected
    (tmp_path / "generation_config.json").unlink()
    (plain,) = gateway_config(Settings.model_validate({"models": [model]})).models
    assert (plain.fingerprint == config.fingerprint) == (not expected)


@pytest.mark.parametrize(("asked", "expected"), [(None, "mean"), ("last", "last")])
def test_vectors_are_what_the_checkpoint_s_makers_mean_by_them(
    asked: str | None, expected: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "chat", tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    model = {"name": "chat", "path": str(tmp_path), "pooling": asked}
    (config,) = gateway_config(Settings.model_validate({"models": [model]})).models
    assert config.pooling == expected


def test_a_cross_encoder_is_a_deployment_with_the_window_of_its_files(folder: Path, tmp_path: Path) -> None:
    path = write_cross_encoder(tmp_path / "judge")
    asked = {"rerankers": [{"name": "judge", "path": str(path), "max_batch": 5}]}
    (reranker,) = gateway_config(settings(folder, **asked)).rerankers
    assert (reranker.name, reranker.max_tokens, reranker.max_batch) == ("judge", CONTEXT, 5)
    handles = build(settings(folder, **asked))._bound_deployment.init_kwargs["rerankers"]
    assert handles["judge"]._bound_deployment.name == "Reranker-judge"
    asked["rerankers"][0]["max_tokens"] = CONTEXT + 1
    with pytest.raises(ConfigError, match=rf"args\.rerankers\[0\]\.max_tokens: {CONTEXT + 1} is over"):
        build(settings(folder, **asked))
    with pytest.raises(ConfigError, match=r"args\.rerankers\[0\]\.path"):
        build(settings(folder, rerankers=[{"name": "judge", "path": "/nowhere"}]))


def test_no_two_servers_share_the_secret_of_their_channels(folder: Path) -> None:
    first, second = (gateway_config(settings(folder)).channel.secret for _ in range(2))
    assert first != second


def test_outside_of_a_cluster_nothing_is_remembered() -> None:
    assert _remembered("secret", lambda: b"one") == b"one"
    assert _remembered("secret", lambda: b"two") == b"two"


def test_in_a_cluster_the_first_build_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[tuple[str, str], bytes] = {}

    def put(name: str, value: bytes, *, overwrite: bool, namespace: str) -> None:
        assert not overwrite
        stored.setdefault((namespace, name), value)

    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda name, *, namespace: stored[namespace, name])
    made = iter([b"one", b"two", b"three"])
    assert [_remembered(name, lambda: next(made)) for name in ("secret", "secret", "other")] == [
        b"one",
        b"one",
        b"three",
    ]


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("deployment", {"Gateway", "Tokenizer", "Safety", "Registry", "Accounts", "Batches", "Model-chat"}),
        ("inline", {"Gateway", "Registry", "Accounts", "Batches", "Model-chat"}),
    ],
)
def test_each_part_is_a_deployment_unless_it_is_placed_inline(placement: str, names: set[str], folder: Path) -> None:
    placed = {"placement": placement}
    app = build(settings(folder, safety={"path": str(folder / "guard")} | placed, tokenizer=placed))
    bound = [argument for argument in app._bound_deployment.init_args if hasattr(argument, "_bound_deployment")]
    (models,) = [argument for argument in app._bound_deployment.init_args if isinstance(argument, dict)]
    found = {part._bound_deployment.name for part in (app, *bound, *models.values())}
    assert found == names


def test_a_part_that_is_stopped_outlives_its_longest_call(folder: Path, tmp_path: Path) -> None:
    """Serve ended a reranker's replica after 20 seconds, and calls that could have taken 30 got a 503."""
    judge = {"name": "judge", "path": str(write_cross_encoder(tmp_path / "judge")), "timeout_s": 30}
    safety = {"path": str(folder / "guard"), "timeout_s": 45}
    bound = build(settings(folder, rerankers=[judge], safety=safety))._bound_deployment
    parts = [argument for argument in bound.init_args if hasattr(argument, "_bound_deployment")]
    limits = {
        part._bound_deployment.name: part._bound_deployment._deployment_config.graceful_shutdown_timeout_s
        for part in (*parts, *bound.init_kwargs["rerankers"].values())
    }
    assert limits["Reranker-judge"] > 30
    assert limits["Safety"] > 45
    assert limits["Tokenizer"] > ENCODE_TIMEOUT_S


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/nowhere/at/all"}, ("args.models[0].path", "/nowhere/at/all")),
        ({"engine": {"max_model_len": CONTEXT + 1}}, ("engine.max_model_len", str(CONTEXT + 1), str(CONTEXT))),
        ({"adapter_folder": "/nowhere/at/all"}, ("args.models[0].adapter_folder", "/nowhere/at/all")),
        ({"tokenizer_path": "/nowhere/at/all"}, ("args.models[0].tokenizer_path",)),
        ({"chat_template": "/nowhere/at/all"}, ("args.models[0].chat_template", "/nowhere/at/all")),
        ({"engine": {"draft_model": "/nowhere/at/all"}}, ("args.models[0].engine.draft_model", "/nowhere/at/all")),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(
    change: dict[str, Any], words: tuple[str, ...], folder: Path
) -> None:
    model = {"name": "chat", "path": str(folder / "chat"), "adapter_folder": str(folder / "adapters")} | change
    with pytest.raises(ConfigError) as refused:
        build(Settings.model_validate({"models": [model]}))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_what_lies_unfit_in_the_drop_in_folder_keeps_no_server_from_starting(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"name": "chat", "path": str(folder / "chat"), "adapter_folder": str(folder / "adapters")}
    asked = Settings.model_validate({"models": [model | {"engine": {"max_adapter_rank": 4}}]})
    with caplog.at_level(logging.WARNING):
        (built,) = gateway_config(asked).models
    assert "large" not in {ref.name for ref in built.adapters}
    words = ("args.models[0].adapter_folder", "large", "8", "4")
    assert all(word in caplog.text for word in words), caplog.text
    notes: list[str] = []
    assert mistakes(asked, reads_all=True, notes=notes) == []
    (told,) = notes
    assert all(word in told for word in words), told


def test_a_folder_with_the_name_of_a_model_is_named_by_the_check_as_by_a_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check passed without a word, and the server then left the adapter out."""
    model = {"name": "large", "path": str(folder / "chat"), "adapter_folder": str(folder / "adapters")}
    asked = Settings.model_validate({"models": [model]})
    with caplog.at_level(logging.WARNING):
        (built,) = gateway_config(asked).models
    assert [ref.name for ref in built.adapters] == ["small"]
    told = "args.models[0].adapter_folder: Adapter 'large' cannot be used: a base model has this name"
    assert told in caplog.text
    notes: list[str] = []
    assert mistakes(asked, reads_all=True, notes=notes) == []
    assert [note.rstrip(".") for note in notes] == [told]


def test_a_start_reads_only_what_is_new_in_a_drop_in_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read all adapters, of which a thousand may have a hundred GB."""
    shutil.copytree(folder / "adapters", tmp_path / "adapters")
    (tmp_path / "adapters" / "linked").symlink_to(tmp_path / "adapters" / "small")
    read: list[str] = []

    def reading(root: str, name: str, **rest: Any) -> AdapterRef:
        read.append(name)
        return reference_in(root, name, **rest)

    def started(**engine: Any) -> tuple[list[str], dict[str, str]]:
        read.clear()
        model = {"name": "chat", "path": str(folder / "chat"), "adapter_folder": str(tmp_path / "adapters")}
        asked = {"models": [model | {"engine": engine}], "registry": {"folder": str(tmp_path / "store")}}
        (built,) = gateway_config(Settings.model_validate(asked)).models
        return sorted(read), {ref.name: ref.path for ref in built.adapters}

    monkeypatch.setattr(declared_adapters, "reference_in", reading)
    every = ["large", "linked", "small"]
    assert started()[0] == every
    before = started()
    assert before[0] == []
    assert sorted(before[1]) == every
    os.utime(tmp_path / "adapters" / "large" / "adapter_model.safetensors")
    assert started() == (["large"], before[1])
    # What does not fit is read again: somebody may want to know why.
    assert [started(max_adapter_rank=4)[0] for _ in range(2)] == [every, ["large"]]
    (tmp_path / "adapters" / "linked").unlink()
    (tmp_path / "adapters" / "small").rename(tmp_path / "adapters" / "tiny")
    (tmp_path / "adapters" / "linked").symlink_to(tmp_path / "adapters" / "tiny")
    assert started(max_adapter_rank=4)[0] == ["large", "linked", "tiny"]


def test_an_adapter_in_a_folder_of_two_models_is_the_first_one_s(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was declared for both, so that each start moved its name, which cost its other versions and its traffic."""
    model = {"path": str(folder / "chat"), "adapter_folder": str(folder / "adapters")}
    asked = Settings.model_validate(
        {"models": [model | {"name": "first", "engine": {"max_adapter_rank": 4}}, model | {"name": "second"}]}
    )
    with caplog.at_level(logging.WARNING):
        first, second = gateway_config(asked).models
    assert [ref.name for ref in first.adapters] == ["small"]
    assert [ref.name for ref in second.adapters] == ["large"]
    told = "args.models[1].adapter_folder: Adapter 'small' cannot be used: it is declared for the base model first"
    assert told in caplog.text


def test_a_link_in_the_drop_in_folder_may_lead_into_another_permitted_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "drop-in").mkdir()
    (tmp_path / "drop-in" / "link").symlink_to(folder / "adapters" / "small")
    model = {"name": "chat", "path": str(folder / "chat"), "adapter_folder": str(tmp_path / "drop-in")}
    for allowed, names in (([str(folder / "adapters")], ["link"]), ([], [])):
        asked = Settings.model_validate({"models": [model], "registry": {"allowed_folders": allowed}})
        (built,) = gateway_config(asked).models
        assert [ref.name for ref in built.adapters] == names
        notes: list[str] = []
        assert mistakes(asked, reads_all=True, notes=notes) == []
        assert len(notes) == 1 - len(names)


def test_an_adapter_of_another_geometry_is_refused(folder: Path, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(write_chat_model(tmp_path / "other", seed=1))
    for layer in other.model.layers:
        layer.self_attn.q_proj.out_features = 48
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.repeat(2, 1)[:48]
    get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "misfit")
    model = {
        "name": "chat",
        "path": str(folder / "chat"),
        "adapters": [{"name": "misfit", "path": str(tmp_path / "misfit")}],
    }
    with pytest.raises(ConfigError, match=r"args\.models\[0\]\.adapters\[0\].*misfit"):
        build(Settings.model_validate({"models": [model]}))


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_adapter_with_tokens_of_its_own_is_refused(is_declared: bool, folder: Path, tmp_path: Path) -> None:
    """It was served with another tokenization than it was trained with. An earlier start may not have seen them."""
    shutil.copytree(folder / "adapters" / "small", tmp_path / "drop-in" / "own")
    declared = {"adapters": [{"name": "own", "path": str(tmp_path / "drop-in" / "own")}]}
    model = {"name": "chat", "path": str(folder / "chat")}
    model |= declared if is_declared else {"adapter_folder": str(tmp_path / "drop-in")}
    asked = Settings.model_validate({"models": [model], "registry": {"folder": str(tmp_path / "store")}})
    shutil.copy(folder / "chat" / "tokenizer.json", tmp_path / "drop-in" / "own")
    (built,) = gateway_config(asked).models
    assert [ref.name for ref in built.adapters] == ["own"]
    (tmp_path / "drop-in" / "own" / "added_tokens.json").write_text('{"<|tool|>": 3}')
    word = "its tokenizer adds the token '<|tool|>' (3)"
    notes: list[str] = []
    (told,) = mistakes(asked, reads_all=True, notes=notes) + notes
    assert word in told
    if is_declared:
        with pytest.raises(ConfigError, match="its tokenizer adds the token"):
            gateway_config(asked)
    else:
        assert gateway_config(asked).models[0].adapters == ()


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_adapter_whose_numbers_are_not_finite_is_refused(is_declared: bool, folder: Path, tmp_path: Path) -> None:
    """Its first request told it, not the check."""
    shutil.copytree(folder / "adapters" / "small", tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "adapter_model.safetensors")
    bad = sorted(tensors)[-1]
    tensors[bad][0, 0] = float("nan")
    save_file(tensors, tmp_path / "broken" / "adapter_model.safetensors")
    declared = {"adapters": [{"name": "broken", "path": str(tmp_path / "broken")}]}
    model = {"name": "chat", "path": str(folder / "chat")}
    asked = Settings.model_validate(
        {"models": [model | (declared if is_declared else {"adapter_folder": str(tmp_path)})]}
    )
    notes: list[str] = []
    (told,) = mistakes(asked, reads_all=True, notes=notes) + notes
    assert len(notes) == (not is_declared)
    assert told.startswith(f"args.models[0].{'adapters[0]' if is_declared else 'adapter_folder'}: ")
    assert f"'broken' cannot be used: tensor '{bad}' holds NaN or infinity" in told


def test_a_draft_model_is_found_and_checked(folder: Path, tmp_path: Path) -> None:
    model = {"name": "chat", "path": str(folder / "chat"), "engine": {"draft_model": str(folder / "chat")}}
    (built,) = gateway_config(Settings.model_validate({"models": [model]})).models
    assert built.engine.draft_model == str(folder / "chat")
    excluded = {"draft_model": str(folder / "chat"), "num_speculative_tokens": 0}
    (told,) = mistakes(Settings.model_validate({"models": [model | {"engine": excluded}]}), reads_all=True)
    assert told.startswith("args.models[0].engine.draft_model: ")
    assert "num_speculative_tokens" in told
    shutil.copytree(folder / "chat", tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").unlink()
    lacking = {"draft_model": str(tmp_path / "draft")}
    (told,) = mistakes(Settings.model_validate({"models": [model | {"engine": lacking}]}), reads_all=True)
    assert told.startswith("args.models[0].engine.draft_model: ")


def test_every_adapter_that_cannot_be_used_is_named(folder: Path) -> None:
    adapters = [{"name": f"large-{index}", "path": str(folder / "adapters" / "large")} for index in range(2)]
    model = {
        "name": "chat",
        "path": str(folder / "chat"),
        "adapter_folder": str(folder / "adapters"),
        "adapters": adapters,
        "engine": {"max_adapter_rank": 4},
    }
    places = ("adapter_folder", "adapters[0]", "adapters[1]")
    notes: list[str] = []
    found = mistakes(Settings.model_validate({"models": [model]}), reads_all=True, notes=notes)
    assert [line.partition(":")[0] for line in notes + found] == [f"args.models[0].{place}" for place in places]


def test_it_says_what_is_lost_without_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
    with caplog.at_level(logging.WARNING):
        build(settings(folder))
    assert "RAY_SERVE_ENABLE_HA_PROXY is not set" in caplog.text
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED" not in caplog.text


@pytest.mark.parametrize(
    ("host", "fields", "is_refused"),
    [
        ("0.0.0.0", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"allow_anonymous": True}, False),
        ("0.0.0.0", {"tenants": [{"name": "a", "keys_sha256": [key_digest("a-key-of-sixteen")]}]}, False),
    ],
)
def test_a_server_that_others_reach_is_not_opened_to_them_by_a_later_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, host: str, fields: dict[str, Any], is_refused: bool
) -> None:
    """`serve deploy` of a file without the keys of the one before opened it to everybody, without a word."""
    monkeypatch.setattr(builder, "_listen_host", lambda: host)
    with pytest.raises(ConfigError, match=r"^args\.tenants: ") if is_refused else nullcontext():
        build(settings(folder, **fields))


def test_the_registry_has_absolute_places_and_can_be_left_out(folder: Path) -> None:
    chosen = settings(folder, registry={"folder": str(folder / "kept"), "allowed_folders": [str(folder / "more")]})
    assert chosen.registry is not None
    config = registry_config(chosen, chosen.registry, gateway_config(chosen).models, {})
    assert config.store_path == str(folder / "kept" / "adapters.sqlite")
    (base,) = config.bases
    assert (base.name, base.watched, base.allowed) == ("chat", str(folder / "adapters"), (str(folder / "more"),))
    assert base.tokenizer == str(folder / "chat")
    assert [ref.name for ref in config.declared_by_base["chat"]] == ["large", "small"]
    app = build(settings(folder, registry=None))
    names = [
        part._bound_deployment.name for part in app._bound_deployment.init_args if hasattr(part, "_bound_deployment")
    ]
    assert "Registry" not in names


def test_what_adapters_are_fetched_by_must_be_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ["hf://org/", "https://host:8443/adapters/", "s3://bucket/"]
    chosen = settings(folder, registry={"sources": sources})
    assert chosen.registry is not None
    for spec in (None, object()):
        monkeypatch.setattr("app.resolved.importlib.util.find_spec", lambda name, spec=spec: spec)
        if spec is None:
            with pytest.raises(ConfigError, match=r"registry.sources: 's3://bucket/' needs `pip install s3fs`"):
                registry_config(chosen, chosen.registry, (), {})
        else:
            config = registry_config(chosen.model_copy(update={"models": ()}), chosen.registry, (), {})
            assert config.sources == (*sources,)


def test_what_keeps_files_runs_where_it_finds_them_again(folder: Path) -> None:
    """At the head, whatever it has to give: on another node an actor that is started anew would begin with nothing."""
    arguments = build(settings(folder, accounts={}))._bound_deployment.init_args
    bound = [argument._bound_deployment for argument in arguments if hasattr(argument, "_bound_deployment")]
    keepers = {part.name: part.ray_actor_options for part in bound if part.name in ("Registry", "Accounts", "Batches")}
    assert len(keepers) == 3
    for options in keepers.values():
        assert options["num_cpus"] == 0
        assert options["resources"] == {"node:__internal_head__": 0.001}


def test_batches_have_an_absolute_folder_and_can_be_left_out(folder: Path) -> None:
    chosen = settings(folder, batches={"folder": "kept", "max_lines": 7}, limits={"max_body_bytes": 5000})
    assert chosen.batches is not None
    config = batches_config(chosen, chosen.batches)
    assert (config.folder, config.max_lines, config.max_line_bytes) == (str(Path("kept").absolute()), 7, 5000)
    app = build(settings(folder, batches=None))
    names = [
        part._bound_deployment.name for part in app._bound_deployment.init_args if hasattr(part, "_bound_deployment")
    ]
    assert "Batches" not in names


def test_the_admin_key_comes_from_the_environment_or_as_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(**args: object) -> str | None:
        app: partial[object] = build(settings(folder, **args))._bound_deployment.init_args[1]
        return app.keywords["admin_key_sha256"]

    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    assert known() is None
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "secret")
    assert known() == key_digest("secret")
    assert known(admin_key_sha256="a" * 64) == "a" * 64


def test_keys_of_tenants_come_from_the_environment_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = [
        {"name": "blue", "keys_sha256": [key_digest("first")], "key_variables": ["BLUE_KEY"]},
        {"name": "red", "key_variables": ["RED_KEY"]},
    ]
    monkeypatch.setenv("BLUE_KEY", "second")
    monkeypatch.delenv("RED_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^args\.tenants\[1\]\.key_variables: the environment has no RED_KEY"):
        build(settings(folder, tenants=tenants))
    monkeypatch.setenv("RED_KEY", "first")
    with pytest.raises(ConfigError, match=r"^args\.tenants\[1\]\.key_variables: RED_KEY holds a key of another tenant"):
        build(settings(folder, tenants=tenants))
    monkeypatch.setenv("RED_KEY", "third")
    app: partial[object] = build(settings(folder, tenants=tenants))._bound_deployment.init_args[1]
    by_digest = {key_digest(key): name for key, name in (("first", "blue"), ("second", "blue"), ("third", "red"))}
    assert app.keywords["key_ring"].name_by_digest == by_digest


def test_origins_reach_the_application(folder: Path) -> None:
    app: partial[object] = build(settings(folder, allowed_origins=["https://a.example"]))._bound_deployment.init_args[1]
    assert app.keywords["allowed_origins"] == ("https://a.example",)


@pytest.mark.parametrize(
    ("transport", "router"), [("tcp", "FirstTokenRouter"), ("handle", "PowerOfTwoChoicesRequestRouter")]
)
def test_replicas_are_chosen_by_what_they_tell_where_they_can(transport: str, router: str, folder: Path) -> None:
    model = gateway_config(settings(folder)).models[0]
    config = _request_router(model, ChannelConfig(secret=b"", transport=transport), 7)
    assert config.get_request_router_class().__name__ == router


def test_what_no_engine_could_do_is_refused_before_anything_is_replaced_for_it(folder: Path) -> None:
    for engine, field in (({"dtype": "float16"}, "dtype"), ({"kv_cache_bytes": 1000}, "kv_cache_bytes")):
        with pytest.raises(ConfigError, match=rf"^args\.models\[0\]\.engine\.{field}: "):
            build(settings(folder, engine=engine))
