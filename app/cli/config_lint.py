"""A whole Serve config file -> one line for each mistake, with its place.

Serve accepts unknown keys in silence, at every level above `args`; here each is an error with the nearest known key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from app.checkpoint_source import is_hub_id
from app.cli.config_file import BUILDER, read_config
from app.settings import Settings
from deployments.config import GATEWAY, REGISTRY


def lint_config(path: str | Path) -> list[str]:
    """Return one line for each mistake in the Serve config file at `path`; empty where it is good."""
    try:
        tree = read_config(path)
    except ValueError as error:
        return [str(error)]
    lines = list(_unknown_keys(tree))
    if not lines:
        lines += _validation_lines(ServeDeploySchema, tree, "")
    for index, application in enumerate(_list(tree.get("applications"))):
        if isinstance(application, dict) and application.get("import_path") == BUILDER:
            lines += _lint_application(application, f"applications[{index}]")
    return list(dict.fromkeys(lines))


def deployment_names(settings: Settings) -> list[str]:
    """Return the names that `deployments` overrides of an application may use."""
    names = [GATEWAY, *(f"Model-{model.name}" for model in settings.models)]
    if settings.tokenizer.placement == "deployment":
        names.append("Tokenizer")
    if settings.safety is not None and settings.safety.placement == "deployment":
        names.append("Safety")
    names += [f"Reranker-{reranker.name}" for reranker in settings.rerankers]
    return names + single_names(settings)


def single_names(settings: Settings) -> list[str]:
    """Return the names of those deployments of which there is one replica, which decides for all."""
    singles = {REGISTRY: settings.registry, "Accounts": settings.accounts, "Batches": settings.batches}
    return [name for name, wanted in singles.items() if wanted is not None]


def _lint_application(application: dict[str, Any], place: str) -> list[str]:
    args = application.get("args") or {}
    lines = _validation_lines(Settings, args, f"{place}.args")
    if lines:
        return lines
    settings = Settings.model_validate(args)
    known, singles = deployment_names(settings), single_names(settings)
    for index, deployment in enumerate(_list(application.get("deployments"))):
        if not isinstance(deployment, dict):
            continue
        name, here = deployment.get("name"), f"{place}.deployments[{index}]"
        if isinstance(name, str) and name not in known:
            lines.append(f"{here}.name: no deployment '{name}'; {_hint(name, known)}")
        scales = deployment.get("num_replicas", 1) != 1 or deployment.get("autoscaling_config") is not None
        if name in singles and scales:
            lines.append(f"{here}.num_replicas: of '{name}' there is one replica")
    return lines + list(_missing_folders(settings, f"{place}.args"))


def _missing_folders(settings: Settings, place: str) -> Iterator[str]:
    folders: dict[str, str | None] = {}
    for index, model in enumerate(settings.models):
        here = f"{place}.models[{index}]"
        folders |= {f"{here}.path": model.path, f"{here}.tokenizer_path": model.tokenizer_path}
        folders |= {f"{here}.adapters[{i}].path": adapter.path for i, adapter in enumerate(model.adapters)}
        folders[f"{here}.adapter_folder"] = model.adapter_folder
    if settings.safety is not None:
        folders[f"{place}.safety.path"] = settings.safety.path
    folders |= {f"{place}.rerankers[{i}].path": reranker.path for i, reranker in enumerate(settings.rerankers)}
    for key, folder in folders.items():
        if folder is not None and not Path(folder).is_dir() and not is_hub_id(folder):
            yield f"{key}: the folder '{folder}' does not exist"


def _unknown_keys(tree: dict[str, Any]) -> Iterator[str]:
    yield from _check_keys(tree, ServeDeploySchema, "")
    yield from _check_keys(tree.get("http_options"), HTTPOptionsSchema, "http_options")
    for index, application in enumerate(_list(tree.get("applications"))):
        place = f"applications[{index}]"
        yield from _check_keys(application, ServeApplicationSchema, place)
        deployments = application.get("deployments") if isinstance(application, dict) else None
        for number, deployment in enumerate(_list(deployments)):
            here = f"{place}.deployments[{number}]"
            yield from _check_keys(deployment, DeploymentSchema, here)
            if isinstance(deployment, dict):
                options, scaling = deployment.get("ray_actor_options"), deployment.get("autoscaling_config")
                yield from _check_keys(options, RayActorOptionsSchema, f"{here}.ray_actor_options")
                yield from _check_keys(scaling, AutoscalingConfig, f"{here}.autoscaling_config")


def _check_keys(node: object, schema: type[BaseModel], place: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key in node:
            if key not in schema.model_fields:
                yield f"{_join(place, key)}: unknown key; {_hint(str(key), schema.model_fields)}"


def _validation_lines(schema: type[BaseModel], tree: object, place: str) -> list[str]:
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        return [_validation_line(item, place) for item in error.errors()]
    return []


def _validation_line(error: Mapping[str, Any], place: str) -> str:
    for key in error["loc"]:
        place = _join(place, key)
    if error["type"] == "unknown_key":
        context = error["ctx"]
        return f"{_join(place, context['key'])}: unknown key; {context['hint']}"
    text = "is missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, ")
    return f"{place or 'the file'}: {text[:1].lower()}{text[1:]}"


def _join(place: str, key: object) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else str(key)


def _hint(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
