"""Read the Serve config file without validating it. Imports little, because it stays loaded while a server runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.checkpoint_source import is_hub_id

BUILDER = "app.builder:build"
"""The `import_path` whose `args` are our `Settings`."""


def our_applications(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return our applications in a valid configuration."""
    return [application for application in tree["applications"] if application.get("import_path") == BUILDER]


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys in a mapping: YAML forbids them, but PyYAML silently keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the mapping node as written; its keys are checked before merge keys are expanded."""
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
        ValueError: the file cannot be read, is not YAML, or is not a mapping; the message is one line.
    """
    try:
        tree = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        is_model = Path(path).is_dir() or is_hub_id(str(path))
        advice = f"; for a model, `antiphon init {path}` writes a configuration" if is_model else ""
        raise ValueError(f"{path}: cannot be read: {error.strerror}{advice}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{path}: {place}not valid YAML: {problem}") from error
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must be a mapping with the key 'applications'")
    return tree
