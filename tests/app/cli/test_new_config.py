from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main as cli
from app.cli.config_lint import lint_config
from app.cli.new_config import DEVICES, new_config
from tests.app.cli.test_config_lint import good_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a model."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    good_config(folder)
    return folder


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def model_of(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["applications"][0]["args"]["models"][0]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_command_writes_a_valid_configuration_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loras").mkdir()
    ask = ["init", model.name, "--adapters", "loras", "--port", "9001", "--device", device]
    assert cli.main(ask) == 0
    written = tmp_path / f"{model.name}.yaml"
    assert f"antiphon serve {written.name}" in capsys.readouterr().out
    assert lint_config(written) == []
    tree = read(written)
    assert tree["http_options"] == {"host": "127.0.0.1", "port": 9001}
    assert model_of(tree) == {
        "name": model.name,
        "path": str(model),
        "adapter_folder": str(tmp_path / "loras"),
        "engine": {"device": device},
    }
    written.write_text("mine")
    assert cli.main(ask) == 2
    assert "exists; --output names another file" in capsys.readouterr().err
    assert written.read_text() == "mine"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("a model (v2)", "a-model-v2"),
        ("1.5", "1.5"),
        ("no", "no"),
        ("模型", "model"),
        ("x" * 200, "x" * 100),
        ("a 😀\x85é 𠀀", "a"),
        ('"\\ud83d" 😀', "ud83d"),
    ],
)
def test_whatever_a_folder_is_called_its_model_gets_a_name(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    found, text = new_config(str(tmp_path / folder))
    tree = yaml.safe_load(text)
    assert found == model_of(tree)["name"] == name
    assert model_of(tree)["path"] == str(tmp_path / folder)
    assert tree["applications"][0]["deployments"][0]["name"] == f"Model-{name}"


def test_a_hub_id_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, text = new_config("Qwen/Qwen3-0.6B")
    tree = yaml.safe_load(text)
    assert model_of(tree) == {"name": name, "path": "Qwen/Qwen3-0.6B", "engine": {"device": "cpu"}}
    assert (name, tree["http_options"]["port"]) == ("Qwen3-0.6B", 8000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' is neither a folder nor a hub id"),
        ([".", "--adapters", "nowhere"], "--adapters: the folder 'nowhere' does not exist"),
        ([".", "--device", "tpu"], "'tpu' is neither cpu nor cuda"),
        ([".", "--output", "none/x.yaml"], "none/x.yaml cannot be written: No such file"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_in_the_place_of_its_model_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (model / "adapter_config.json").write_text("{}")
    assert cli.main(["init", str(model)]) == 2
    assert f"'{model}' is an adapter; name its base model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


def test_a_configuration_that_is_wrong_is_not_left_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (model / "tokenizer.json").write_text("{}")
    assert cli.main(["init", str(model)]) == 2
    told = capsys.readouterr().err
    assert "the tokenizer" in told
    assert told.endswith(f"{model.name}.yaml was not kept.\n")
    assert list(tmp_path.iterdir()) == [model]


@pytest.fixture
def small_files(model: Path) -> Iterator[None]:
    """Once there is a model, files cannot grow beyond some bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_configuration_that_cannot_be_written_whole_is_not_left_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next attempt was refused for the file of the first."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", str(model)]) == 2
    assert f"{model.name}.yaml cannot be written: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [model]


def test_a_model_in_the_place_of_a_configuration_is_told_how_to_get_one(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(model)]) == 2
    assert f"antiphon init {model}" in capsys.readouterr().err
