"""Lint a whole Serve config file: one line per mistake, with its place.

Serve silently accepts unknown keys at every level above `args`; here each is an error that suggests the nearest known
key.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from adapters.registry import nested_adapters
from app.checkpoint_source import HubUnreachableError, is_hub_id, local_folder
from app.cli.config_file import BUILDER, read_config
from app.cli.deployment_lint import option_lines
from app.cli.preflight import is_loopback, listen_address
from app.settings import Settings
from app.settings_check import mistakes, tokenizer_mistakes
from app.settings_node import hint
from deployments.config import (
    ACCOUNTS,
    BATCHES,
    GATEWAY,
    REGISTRY,
    SAFETY,
    TOKENIZER,
    model_deployment,
    reranker_deployment,
)
from deployments.database import sqlite_folder
from engine.errors import CheckpointError

MAX_PORT = 65_535
TEXT_BY_TYPE = {
    "missing": "is missing",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list",
}
"""Replaces messages of pydantic that mention what a YAML file does not have: tuples, dictionaries and our classes."""
ROUTE_PREFIX = re.compile(r"/|(?:/[^/{}?#\s]+)+")


def lint_config(path: str | Path, *, reads_all: bool = True, notes: list[str] | None = None) -> list[str]:
    """Return one line for each mistake in the Serve config file at `path`; empty if it is valid.

    Args:
        reads_all: see `app.settings_check.mistakes`; also read tokenizers.
        notes: see there.
    """
    notes = [] if notes is None else notes
    try:
        tree = read_config(path)
    except ValueError as error:
        return [str(error)]
    lines = list(_unknown_keys(tree, ServeDeploySchema))
    if not lines:
        lines += _validation_lines(ServeDeploySchema, tree, "")
    if not lines:
        lines += _unreachable(tree)
    ours = settings_by_place(tree)
    for index, application in enumerate(_list(tree.get("applications"))):
        place = f"applications[{index}]"
        if isinstance(application, dict) and application.get("import_path") == BUILDER:
            lines += _lint_application(application, place, ours.get(f"{place}.args"), notes, reads_all=reads_all)
        elif isinstance(application, dict):
            lines += _missing_module(application, f"{place}.import_path")
    if reads_all:
        lines += _tokenizer_lines(ours)
    if not lines:
        lines += _open_to_strangers(tree, ours)
        lines += _shared_folders(ours)
    return list(dict.fromkeys(lines))


def settings_by_place(tree: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the settings of our applications, without invalid ones, by the place of their `args` in the file."""
    found = {}
    for index, application in enumerate(_list(tree.get("applications"))):
        if isinstance(application, dict) and application.get("import_path") == BUILDER:
            with suppress(ValidationError):
                found[f"applications[{index}].args"] = Settings.model_validate(application.get("args") or {})
    return found


def overlooked_adapters(path: str | Path) -> list[str]:
    """Return one line for each place in the drop-in folders of a valid config file with adapters that are not found."""
    return [
        f"{place}.models[{index}].adapter_folder: the adapter in '{Path(folder, nested)}' is not loaded, as only "
        f"folders directly in '{folder}' are; move it there, or name it under `adapters`"
        for place, settings in settings_by_place(read_config(path)).items()
        for index, model in enumerate(settings.models)
        if (folder := model.adapter_folder) is not None
        for nested in nested_adapters(folder)
        if Path(folder, nested).resolve() not in {Path(adapter.path).resolve() for adapter in model.adapters}
    ]


def deployment_names(settings: Settings) -> list[str]:
    """Return the deployment names that an application's `deployments` may override."""
    names = [GATEWAY, *(model_deployment(model.name) for model in settings.models)]
    if settings.tokenizer.placement == "deployment":
        names.append(TOKENIZER)
    if settings.safety is not None and settings.safety.placement == "deployment":
        names.append(SAFETY)
    names += [reranker_deployment(reranker.name) for reranker in settings.rerankers]
    return names + single_names(settings)


def single_names(settings: Settings) -> list[str]:
    """Return the names of deployments that must have exactly one replica, because it decides for the application."""
    singles = {REGISTRY: settings.registry, ACCOUNTS: settings.accounts, BATCHES: settings.batches}
    return [name for name, wanted in singles.items() if wanted is not None]


def hub_ids(path: str | Path) -> dict[str, str]:
    """Return the hub ids in a valid config file, with the place of each in the file."""
    place_by_id: dict[str, str] = {}
    for args, settings in settings_by_place(read_config(path)).items():
        for key, folder in settings.sources().items():
            if is_hub_id(folder):
                place_by_id.setdefault(folder, f"{args}.{key}")
    return place_by_id


def fetch(path: str | Path) -> list[str]:
    """Download all hub ids of a valid config file, with progress bars; return a line for each that fails.

    Otherwise a worker of Ray downloads them during the start, where neither progress nor errors show well.

    Raises:
        HubUnreachableError: another attempt may succeed.
    """
    lines = []
    for hub_id, place in hub_ids(path).items():
        try:
            local_folder(hub_id)
        except HubUnreachableError as error:
            raise HubUnreachableError(f"{path}: {place}: {error}") from None
        except CheckpointError as error:
            lines.append(f"{place}: {error}")
    return lines


def _lint_application(
    application: dict[str, Any], place: str, settings: Settings | None, notes: list[str], *, reads_all: bool
) -> list[str]:
    if settings is None:
        return _validation_lines(Settings, application.get("args") or {}, f"{place}.args")
    lines: list[str] = []
    known, singles = deployment_names(settings), single_names(settings)
    device_by_deployment = {model_deployment(model.name): model.engine.device or "cpu" for model in settings.models}
    seen: set[str] = set()
    for index, deployment in enumerate(_list(application.get("deployments"))):
        if not isinstance(deployment, dict):
            continue
        name, here = deployment.get("name"), f"{place}.deployments[{index}]"
        if not isinstance(name, str):
            continue
        if name in seen:
            lines.append(f"{here}.name: '{name}' is declared twice; Serve would use only the last")
        seen.add(name)
        if isinstance(scaling := deployment.get("autoscaling_config"), dict):
            defaults = AutoscalingConfig.default().model_dump() if deployment.get("num_replicas") == "auto" else {}
            lines += _validation_lines(AutoscalingConfig, defaults | scaling, f"{here}.autoscaling_config")
        if name not in known:
            lines.append(f"{here}.name: no deployment '{name}'; {hint(name, known)}")
        scales = deployment.get("num_replicas", 1) != 1 or deployment.get("autoscaling_config") is not None
        if name in singles and scales:
            lines.append(f"{here}.num_replicas: '{name}' must have exactly one replica")
        lines += option_lines(deployment, here)
        options = deployment.get("ray_actor_options")
        if isinstance(options, dict) and (device := device_by_deployment.get(name)) is not None:
            lines += _gpu_lines(f"{here}.ray_actor_options", device, options.get("num_gpus"))
    lines += _missing_folders(settings, f"{place}.args")
    lines += _unwritable_folders(settings, f"{place}.args")
    noted: list[str] = []
    lines = lines or [f"{place}.{mistake}" for mistake in mistakes(settings, reads_all=reads_all, notes=noted)]
    notes += [f"{place}.{note}" for note in noted]
    return lines


def _gpu_lines(place: str, device: str, num_gpus: object) -> Iterator[str]:
    if device == "cuda" and not num_gpus:
        yield f"{place}: num_gpus is missing; a replica only sees GPUs that it requests"
    if device != "cuda" and num_gpus:
        yield f"{place}.num_gpus: the model's engine.device is '{device}', which leaves the GPU idle; set it to 'cuda'"


def _tokenizer_lines(ours: Mapping[str, Settings]) -> Iterator[str]:
    for place, settings in ours.items():
        if not any(_missing_folders(settings, "")):
            yield from (f"{place.removesuffix('args')}{mistake}" for mistake in tokenizer_mistakes(settings))


def _unreachable(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield mistakes that Serve accepts but that leave an application unreachable."""
    if tree.get("proxy_location") == "Disabled":
        yield "proxy_location: must not be 'Disabled'; without a proxy nothing is served over HTTP"
    if tree.get("target_capacity") == 0:
        yield "target_capacity: must be above 0, at which no deployment has a replica"
    options = tree.get("http_options") or {}
    # Serve takes numbers as text, too.
    if (timeout_s := options.get("request_timeout_s")) is not None and not float(timeout_s) > 0:
        yield f"http_options.request_timeout_s: must be above 0, not {timeout_s}: every request would end at once"
    if float(options.get("keep_alive_timeout_s", 0)) < 0:
        yield "http_options.keep_alive_timeout_s: must be at least 0; HAProxy does not start otherwise"
    for key, value in options.items():
        if key.startswith("ssl_") and value is not None:
            # HAProxy, in front of the gateways, speaks plain HTTP on both sides.
            yield f"http_options.{key}: TLS is not supported here; put a proxy in front that speaks it"
    _, port = listen_address(tree)
    if not 1 <= port <= MAX_PORT:
        yield f"http_options.port: {port} is not between 1 and {MAX_PORT}"
    if not tree["applications"]:
        yield "applications: must contain at least one application"
    for index, application in enumerate(tree["applications"]):
        if "/" in (name := application.get("name", "")):
            yield f"applications[{index}].name: '{name}' must have no '/'"
        prefix, place = application.get("route_prefix", "/"), f"applications[{index}].route_prefix"
        if prefix is None and application["import_path"] == BUILDER:
            yield f"{place}: must be set; without it the application is not served over HTTP"
        if prefix is not None and not ROUTE_PREFIX.fullmatch(prefix):
            yield f"{place}: '{prefix}' must be '/', or a path with a leading and no trailing slash"


def _missing_module(application: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield an error if an application's module is missing; of our packages, only `BUILDER` is an application."""
    if not isinstance(path := application.get("import_path"), str):
        return
    module, _, name = path.partition(":")
    if module.partition(".")[0] == BUILDER.partition(".")[0]:
        yield f"{place}: '{module}:{name}' does not exist; did you mean '{BUILDER}'?"
    elif (
        not application.get("runtime_env")
        and importlib.machinery.PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path]) is None
    ):
        yield f"{place}: module '{module}' not found"


def _open_to_strangers(tree: Mapping[str, Any], ours: Mapping[str, Settings]) -> Iterator[str]:
    """Yield an error if a server reachable from other machines accepts requests from anyone."""
    host, _ = listen_address(tree)
    if any(settings.is_open for settings in ours.values()) and not is_loopback(host):
        yield (
            f"http_options.host: anyone who can reach {host} could send requests: add `tenants` with API keys to args, "
            "listen on 127.0.0.1, or set `allow_anonymous: true`"
        )


def _shared_folders(ours: Mapping[str, Settings]) -> Iterator[str]:
    """Yield an error if applications share a locked folder: the second would wait forever for the first's lock."""
    owners: dict[tuple[str, Path], str] = {}
    for place, settings in ours.items():
        for key, folder in _state_folders(settings).items():
            owner = owners.setdefault((key, Path(folder).absolute()), place)
            if owner != place and key != "accounts.spool_folder":
                yield f"{place}.{key}: '{folder}' is already used by {owner.removesuffix('.args')}"


def _missing_folders(settings: Settings, place: str) -> Iterator[str]:
    folders = {key: folder for key, folder in settings.sources().items() if not is_hub_id(folder)}
    # A drop-in folder is never downloaded.
    drop_in = {f"models[{index}].adapter_folder": model.adapter_folder for index, model in enumerate(settings.models)}
    folders |= {key: folder for key, folder in drop_in.items() if folder is not None}
    for key, folder in folders.items():
        try:
            os.scandir(folder).close()
        except FileNotFoundError:
            yield f"{place}.{key}: the folder '{folder}' does not exist"
        except OSError as error:
            yield f"{place}.{key}: the folder '{folder}' cannot be read: {error.strerror}"


def _unwritable_folders(settings: Settings, place: str) -> Iterator[str]:
    owned = _state_folders(settings)
    for key, folder in (owned | _shareable_folders(settings)).items():
        path = Path(folder).absolute()
        # Below a folder without search permission, even existing paths seem missing.
        nearest = next(there for there in (path, *path.parents) if os.path.exists(there))
        if not nearest.is_dir() or not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
            yield f"{place}.{key}: '{nearest}' is not a writable folder"
        elif nearest == path and key in owned:
            # Entries left by another user's server that used this folder before.
            others = (str(entry) for entry in sorted(path.iterdir()) if not os.access(entry, os.W_OK))
            yield from (f"{place}.{key}: '{entry}' is not writable" for entry in islice(others, 1))


def _state_folders(settings: Settings) -> dict[str, str]:
    """Return the folders that belong to an application, by their keys in `args`."""
    folders: dict[str, str] = {}
    if settings.registry is not None:
        folders["registry.folder"] = settings.registry.folder
    if settings.accounts is not None:
        folders["accounts.spool_folder"] = settings.accounts.spool_folder
    if settings.batches is not None:
        folders["batches.folder"] = settings.batches.folder
    return folders


def _shareable_folders(settings: Settings) -> dict[str, str]:
    """Return the further folders that an application writes, which others may write, too."""
    folders = {
        f"models[{index}].engine.kv_disk_folder": model.engine.kv_disk_folder
        for index, model in enumerate(settings.models)
        if model.engine.kv_disk_folder is not None
    }
    url = None if settings.accounts is None else settings.accounts.database_url
    if url is not None and (folder := sqlite_folder(url)) is not None:
        folders["accounts.database_url"] = str(folder)
    return folders


def _unknown_keys(node: object, schema: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yield the keys that Serve would ignore, at every level, and what it cannot look for keys in."""
    if not isinstance(node, dict):
        yield f"{place}: {TEXT_BY_TYPE['dict_type']}"
        return
    for key, value in node.items():
        here = _join(place, str(key))
        if key not in schema.model_fields:
            yield f"{here}: unknown key; {hint(str(key), schema.model_fields)}"
            continue
        annotation = schema.model_fields[key].annotation
        for part in _schemas_in(annotation):
            if get_origin(annotation) is list:
                for index, entry in enumerate(_list(value)):
                    yield from _unknown_keys(entry, part, f"{here}[{index}]")
            elif isinstance(value, dict):
                yield from _unknown_keys(value, part, here)


def _schemas_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _schemas_in(part)


def _validation_lines(schema: type[BaseModel], tree: object, place: str) -> list[str]:
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        # One line per place: pydantic reports one error for each branch of a union.
        first_by_place: dict[str, Mapping[str, Any]] = {}
        for item in error.errors():
            first_by_place.setdefault(_place(item, tree), item)
        return [_validation_line(item, _join(place, at) if at else place) for at, item in first_by_place.items()]
    # Serve's validators import what a policy names, and look into values of other types.
    except (AttributeError, ImportError, TypeError) as error:
        return [f"{place or 'the file'}: {error}"]
    return []


def _place(error: Mapping[str, Any], tree: object) -> str:
    """Return the file's keys in an error's path, without pydantic's names of union branches."""
    place, here = "", tree
    for number, key in enumerate(error["loc"], 1):
        is_there = key in here if isinstance(here, dict) else isinstance(here, list) and isinstance(key, int)
        if is_there:
            here = here[key]  # type: ignore[index]
        if is_there or (error["type"] == "missing" and number == len(error["loc"])):
            place = _join(place, key)
    return place


def _validation_line(error: Mapping[str, Any], place: str) -> str:
    if error["type"] == "unknown_key":
        context = error["ctx"]
        return f"{_join(place, context['key'])}: unknown key; {context['hint']}"
    text = TEXT_BY_TYPE.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return f"{place or 'the file'}: {text[:1].lower()}{text[1:]}"


def _join(place: str, key: object) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else str(key)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
