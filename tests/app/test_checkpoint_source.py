from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from app.checkpoint_source import HubUnreachableError, is_hub_id, local_folder
from engine.errors import CheckpointError


def test_an_existing_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_folder("models/base") == tmp_path / "models" / "base"


@pytest.mark.parametrize("path", ["models/nope", "/nope", "./nope", "../x/y", "a/b/c", "nope", "org/na me"])
def test_what_is_no_folder_and_no_hub_id_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        local_folder(path)


def test_a_hub_id_is_fetched_without_pickle_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot(repository: str, **patterns: list[str]) -> str:
        asked.append((repository, patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_folder("some-org/some-model") == tmp_path
    ((repository, patterns),) = asked
    assert repository == "some-org/some-model"
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns["allow_patterns"])
    files = ["model-00001-of-00002.safetensors", "config.json", "consolidated.safetensors", "original/params.json"]
    assert [*filter_repo_objects(files, **patterns)] == files[:2]


def answered(status: int) -> HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    return HfHubHTTPError("no way\nto the hub", response=response)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (LocalEntryNotFoundError("no way\nto the hub"), True),
        (answered(502), True),
        (answered(429), True),
        (answered(404), False),
        (HFValidationError("no way\nto the hub"), False),
    ],
)
def test_a_hub_that_gives_nothing_is_one_error_which_tells_whether_to_try_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, may_pass: bool
) -> None:
    def snapshot(repository: str, **patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    words = r"'some-org/some-model' .* could not be fetched .*: no way to the hub"
    with pytest.raises(CheckpointError, match=words) as raised:
        local_folder("some-org/some-model")
    assert isinstance(raised.value, HubUnreachableError) is may_pass
