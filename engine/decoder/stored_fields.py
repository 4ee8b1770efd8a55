"""Fields of a `quantization_config` that may have few values only."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import CheckpointError


def check_fields(fields: Mapping[str, object], wanted: Mapping[str, tuple[object, ...]], within: str) -> None:
    """Refuse a field that has none of the values that are known for it; None among those is a field left out.

    Raises:
        CheckpointError: naming the field, what it is and what is read; `within` is where the fields are.
    """
    for name, known in wanted.items():
        if fields.get(name) not in known:
            values = " or ".join(repr(value) for value in known if value is not None) or "nothing"
            raise CheckpointError(f"{within}.{name} is {fields.get(name)!r}; only {values} is read.")
