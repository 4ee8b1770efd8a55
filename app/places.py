"""Errors of a configuration, with their place in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import AdapterError
from engine.errors import CheckpointError, ConfigError


@contextmanager
def at(place: str) -> Iterator[None]:
    """Prefix errors in the block with their path in `args`."""
    try:
        yield
    except (AdapterError, CheckpointError) as error:
        raise ConfigError(f"args.{place}: {error}") from error
    except OSError as error:
        raise ConfigError(f"args.{place}: {error.filename} cannot be read: {error.strerror}") from error
