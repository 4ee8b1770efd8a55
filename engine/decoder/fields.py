"""Checked reads from a parsed config.json; `CheckpointError` names a wrong or missing field."""

from __future__ import annotations

from collections.abc import Mapping

from engine.decoder.families import Switch
from engine.errors import CheckpointError


class Fields:
    """The fields of a config.json, or of an object in it; `where` is its location for messages."""

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self.config = config
        self.where = where

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`; `default` replaces a missing or null field."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {name} must be an integer of at least {least}, it is {value!r}.")
        return value

    def switch(self, switch: Switch, *, default: bool = False) -> bool:
        """Return the switch itself, or the boolean field that it names."""
        value = switch if isinstance(switch, bool) else self.config.get(switch)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {switch} must be true or false, it is {value!r}.")
        return value

    def positive(self, name: str, default: float | None) -> float:
        """Return a positive number."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise CheckpointError(f"{self.where}: {name} must be a positive number, it is {value!r}.")
        return float(value)


def check_fields(fields: Mapping[str, object], wanted: Mapping[str, tuple[object, ...]], within: str) -> None:
    """Refuse a field whose value is not among those in `wanted`; None there allows a missing field.

    Raises:
        CheckpointError: names the field (below `within`), its value and the supported ones.
    """
    for name, known in wanted.items():
        if fields.get(name) not in known:
            values = " or ".join(repr(value) for value in known if value is not None) or "nothing"
            raise CheckpointError(f"{within}.{name} is {fields.get(name)!r}; only {values} is supported.")
