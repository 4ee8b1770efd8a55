"""Where the code of the product lies, for the tests that read it as text or as syntax."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSES = ("app", "deployments", "engine", "kernels", "adapters")


def product_files() -> list[Path]:
    """Every Python file of the product; the training recipe and the load tests are tools beside it."""
    return python_files(*HOUSES)


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    """Path from the root of the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Dotted name under which the file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def syntax_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def dotted(node: ast.AST) -> str:
    """The source of a plain attribute chain (`os.environ.get`), or the empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
