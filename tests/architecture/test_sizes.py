from __future__ import annotations

import ast

from tests.architecture.exceptions import FILES_OVER_THE_SIZE, FUNCTIONS_OVER_THE_SIZE
from tests.architecture.source_tree import dotted, name_of, product_files, python_files, syntax_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
READ_BY_PEOPLE = (*product_files(), *python_files("loadtest", "models"))


def functions_over_the_size() -> dict[str, int]:
    found = {}
    for path in READ_BY_PEOPLE:
        for node in ast.walk(syntax_of(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            is_kernel = any(dotted(getattr(mark, "func", mark)).endswith("jit") for mark in node.decorator_list)
            if lines > (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES):
                found[f"{name_of(path)}::{node.name}"] = lines
    return found


def test_a_file_fits_in_a_head() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in READ_BY_PEOPLE}
    too_long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert {name: count for name, count in too_long.items() if name not in FILES_OVER_THE_SIZE} == {}
    assert set(FILES_OVER_THE_SIZE) <= set(too_long), "an exception that is no longer needed"


def test_a_function_fits_on_a_screen() -> None:
    too_long = functions_over_the_size()
    assert {name: count for name, count in too_long.items() if name not in FUNCTIONS_OVER_THE_SIZE} == {}
    assert set(FUNCTIONS_OVER_THE_SIZE) <= set(too_long), "an exception that is no longer needed"


def test_every_exception_has_a_reason() -> None:
    reasons = [*FILES_OVER_THE_SIZE.values(), *FUNCTIONS_OVER_THE_SIZE.values()]
    assert all(len(reason.split()) >= 3 for reason in reasons)
