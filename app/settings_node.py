"""What every part of the settings is made of: a frozen node that refuses unknown keys, with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

FolderPath = Annotated[str, StringConstraints(min_length=1, max_length=4096)]

PublicName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
"""What a client writes into `model`: 1 to 128 letters, digits, dots, underscores and hyphens."""


def hint(name: str, known: Iterable[str]) -> str:
    """Return the known name that is nearest to one that is not, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}"


class SettingsNode(BaseModel):
    """One frozen node of the tree; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                context = {"key": str(key), "hint": hint(str(key), cls.model_fields)}
                raise PydanticCustomError("unknown_key", "unknown key '{key}'; {hint}", context)
        return data
