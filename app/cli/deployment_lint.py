"""Lint what a Serve config file sets for one of our deployments and Serve accepts, but no replica starts with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from ray.serve._private.config import ReplicaConfig
from ray.serve.schema import RayActorOptionsSchema


def option_lines(deployment: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yield one line for each option that keeps a deployment's replicas from starting.

    Values of types that Serve refuses are left to its schema.

    Args:
        place: key of the deployment in the file.
    """
    if deployment.get("user_config") is not None:
        yield f"{place}.user_config: must be left out; our deployments are configured by `args`"
    with suppress(ValidationError):
        # As Serve reads them: it takes numbers as text, too.
        options = RayActorOptionsSchema.model_validate(deployment.get("ray_actor_options") or {})
        yield from _actor_lines(options.model_dump(exclude_unset=True), f"{place}.ray_actor_options")


def _actor_lines(options: dict[str, Any], place: str) -> Iterator[str]:
    num_gpus = options.get("num_gpus") or 0.0
    if num_gpus > 1 and not num_gpus.is_integer():
        yield f"{place}.num_gpus: {num_gpus:g} is above 1 and not a whole number"
    try:
        ReplicaConfig.create("replica", ray_actor_options=options)
    except (OverflowError, TypeError, ValueError) as error:
        yield f"{place}: {' '.join(str(error).split())}"
