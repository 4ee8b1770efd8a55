"""Which replicas of a model a changed configuration leaves alone: those that would be told just what they were told.

Serve gives all deployments of an application one version, drawn from its whole `args`, and replaces every replica where
that has changed: with each new tenant all models would be loaded anew, and where a device has no room for two, nobody
would be served meanwhile. So a model's deployment brings a version of its own, which Serve's does not overwrite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve._private.config import DeploymentConfig

from deployments.config import ModelConfig

HOUSES = ("app", "deployments", "engine", "adapters", "kernels")
_SOURCES = {".py", ".cpp", ".h"}


class _OwnVersion(DeploymentConfig):
    """A deployment's options, whose version stays what it was made with."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "version":
            # Serve passes over a deployment whose options are all the same, and never scales it again. This one it
            # compares, and reads for known names only.
            name, value = "user_configured_option_names", self.user_configured_option_names | {f"version {value}"}
        super().__setattr__(name, value)


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Return a deployment whose replicas are replaced where this version changes, or what Ray is asked for them."""
    options = vars(deployment._deployment_config) | {"version": version}
    deployment._deployment_config = _OwnVersion.model_construct(**options)
    return deployment


def model_version(model: ModelConfig, *told: object) -> str:
    """Return a digest of what a model's replicas are made of: what they are told, the files they read, and our code.

    Adapters are not part of it: a request brings what a replica has to know of its own.
    """
    digest = hashlib.sha256(_code_digest().encode())
    digest.update(repr((replace(model, adapters=()), *told)).encode())
    # Of weights the fingerprint tells.
    for folder in sorted({model.engine.model_path, model.tokenizer_path}):
        for path in _files(Path(folder).glob("*.json")):
            digest.update(f"\n{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _code_digest() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for house in HOUSES:
        for path in _files((root / house).rglob("*")):
            if path.suffix in _SOURCES:
                digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in sorted(paths) if path.is_file())
