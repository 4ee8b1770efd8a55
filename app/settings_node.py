"""The base class of all settings: a frozen node that refuses unknown keys and suggests a known one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

NodePath = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
"""A path on each node, where a leading `~` is that node's home folder."""

FolderPath = Annotated[NodePath, AfterValidator(os.path.expanduser)]
"""A path on the machine that reads the configuration; a leading `~` is its user's home folder."""

PublicName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
"""A name that clients send as `model`: 1 to 128 letters, digits, dots, underscores and hyphens."""

NamePattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._*?-]{1,128}$")]
"""A public name, in which `*` stands for any characters and `?` for one."""

Placement = Annotated[
    Literal["deployment", "inline"],
    Field(description="Own replicas, or inside the gateway's process (saves a call)."),
]


def hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}"


class SettingsNode(BaseModel):
    """One frozen node of the settings tree; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                context = {"key": str(key), "hint": hint(str(key), cls.model_fields)}
                raise PydanticCustomError("unknown_key", "unknown key '{key}'; {hint}", context)
        return data
