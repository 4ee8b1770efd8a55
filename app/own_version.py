"""Keep the replicas of a model running when a changed configuration does not affect them.

Serve gives all deployments of an application one version, derived from its whole `args`, and replaces every replica
when it changes. Adding a tenant would reload all models, and if a device has no room for two replicas, nobody would be
served meanwhile. Therefore a model's deployment has its own version, which Serve's does not overwrite.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve._private.config import DeploymentConfig

from deployments.config import ModelConfig
from engine.loading.fingerprint import code_digest

HOUSES = ("app", "deployments", "engine", "adapters", "kernels")


class _OwnVersion(DeploymentConfig):
    """A deployment's options with a fixed version."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "version":
            # Serve skips a deployment whose options are all unchanged, and never scales it again. It compares this
            # option, but ignores unknown names in it.
            name, value = "user_configured_option_names", self.user_configured_option_names | {f"version {value}"}
        super().__setattr__(name, value)


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Return a deployment whose replicas are replaced if this version or their Ray resources change."""
    options = vars(deployment._deployment_config) | {"version": version}
    deployment._deployment_config = _OwnVersion.model_construct(**options)
    return deployment


def model_version(model: ModelConfig, *told: object) -> str:
    """Return a digest of everything that a model's replicas depend on: their arguments, the files they read, our code.

    Adapters are excluded, because a request carries what a replica needs to know of its adapter, and so are chat
    templates, which gateways and tokenizers use.
    """
    digest = hashlib.sha256(own_digest().encode())
    digest.update(repr((replace(model, adapters=(), chat_template=None, template_by_pattern={}), *told)).encode())
    # The fingerprint covers the weights.
    for folder in sorted({model.engine.model_path, model.tokenizer_path}):
        for path in sorted(Path(folder).glob("*.json")):
            if path.is_file():
                digest.update(f"\n{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def own_digest() -> str:
    """Return a digest of our code, which is read once: every model and its adapters ask."""
    return code_digest(HOUSES)
