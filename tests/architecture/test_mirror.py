"""The tests mirror the tree: a reader of a module knows where its tests are."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.exceptions import MODULES_WITHOUT_A_TEST_FILE
from tests.architecture.source_tree import ROOT, name_of, product_files, python_files, syntax_of

TESTS = ROOT / "tests"


def candidates(path: Path) -> list[Path]:
    """Where the tests of a module may lie: beside its folder's name, or in a folder of the same name.

    `kernels/<op>/*.py` is one thing in several files and has one test file, `tests/kernels/test_<op>.py`.
    """
    house, *middle, _file = path.relative_to(ROOT).parts
    stem = path.stem.strip("_")
    if house == "kernels" and middle:
        return [TESTS / "kernels" / f"test_{middle[0]}.py"]
    folders = [TESTS / house, TESTS.joinpath(house, *middle)]
    names = [f"test_{stem}.py", f"test_{stem}_properties.py", "_".join(["test", *middle, stem]) + ".py"]
    return [folder / name for folder in folders for name in names]


def only_declares(tree: ast.Module) -> bool:
    """Whether nothing in a module runs but its declarations: values, protocols, tables. There is nothing to test."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return all(is_inert(line) for body in bodies for line in body)


def is_inert(line: ast.stmt) -> bool:
    return isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))


def test_every_module_has_a_test_file() -> None:
    files = [path for path in (*product_files(), *python_files("loadtest")) if not only_declares(syntax_of(path))]
    without = {name_of(path) for path in files if not any(file.exists() for file in candidates(path))}
    assert without - set(MODULES_WITHOUT_A_TEST_FILE) == set()
    assert set(MODULES_WITHOUT_A_TEST_FILE) <= without, "an exception that is no longer needed"


def test_every_exception_says_where_the_module_is_tested() -> None:
    for module, reason in MODULES_WITHOUT_A_TEST_FILE.items():
        assert len(reason.split()) >= 3, module


def test_a_module_that_computes_is_not_taken_for_one_that_declares() -> None:
    assert only_declares(
        ast.parse("class A:\n    x: int\n    def f(self) -> int:\n        'Says.'\n        ...\nB = {1: 2}")
    )
    assert not only_declares(ast.parse("class A:\n    async def f(self) -> int:\n        return 1"))
