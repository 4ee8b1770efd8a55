"""Configuration comes from one typed tree; the environment is read in two named places only."""

from __future__ import annotations

import ast

from tests.architecture.exceptions import FILES_THAT_READ_THE_ENVIRONMENT
from tests.architecture.source_tree import dotted, name_of, product_files, syntax_of

READERS = {"os.environ", "os.getenv", "os.environb", "os.putenv", "os.unsetenv"}


def reads_of_the_environment(tree: ast.Module) -> list[int]:
    lines = []
    for node in ast.walk(tree):
        is_reader = isinstance(node, ast.Attribute) and dotted(node) in READERS
        is_import = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(f"os.{alias.name}" in READERS for alias in node.names)
        )
        if is_reader or is_import:
            lines.append(node.lineno)
    return lines


def test_the_environment_is_read_in_named_files_only() -> None:
    found = {name_of(path): lines for path in product_files() if (lines := reads_of_the_environment(syntax_of(path)))}
    assert {name: lines for name, lines in found.items() if name not in FILES_THAT_READ_THE_ENVIRONMENT} == {}


def test_the_rule_sees_every_spelling() -> None:
    for source in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"):
        assert reads_of_the_environment(ast.parse(source)), source
    assert not reads_of_the_environment(ast.parse("import os\nos.path.join('environ')"))
