"""The Serve config file as it is written: read, not checked. Imports next to nothing, for a running server keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

BUILDER = "app.builder:build"
"""The `import_path` whose `args` are our `Settings`."""


def our_applications(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return those of a good configuration that are ours."""
    return [application for application in tree["applications"] if application.get("import_path") == BUILDER]


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML forbids it, and the last would win in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping of the text, its keys looked at before references are put in their places."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"duplicate key '{key.value}'"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return node


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed file.

    Raises:
        ValueError: one line: there is no such file, it is not YAML, or not a mapping.
    """
    try:
        tree = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{path}: {place}not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must be a mapping with the key 'applications'")
    return tree
