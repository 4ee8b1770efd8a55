"""The wall clock may be set by hours at any moment: it tells dates, and measures nothing that is waited for."""

from __future__ import annotations

import ast

from tests.architecture.exceptions import FILES_THAT_ASK_FOR_THE_DATE
from tests.architecture.source_tree import dotted, name_of, product_files, syntax_of

WALL_CLOCKS = ("time.time", "time.time_ns", "time.localtime", "time.gmtime", "now", "utcnow", "today")
MTIMES = ("st_mtime", "st_mtime_ns", "getmtime")


def asks_for_the_date(tree: ast.Module) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            is_date = name.startswith(("datetime.", "date.")) and node.attr in WALL_CLOCKS
            if name in WALL_CLOCKS or is_date or node.attr in MTIMES:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for alias in node.names if f"time.{alias.name}" in WALL_CLOCKS]
    return found


def test_only_what_tells_a_date_asks_for_it() -> None:
    found = {name_of(path): lines for path in product_files() if (lines := asks_for_the_date(syntax_of(path)))}
    assert {name: lines for name, lines in found.items() if name not in FILES_THAT_ASK_FOR_THE_DATE} == {}
    assert set(FILES_THAT_ASK_FOR_THE_DATE) <= set(found), "an exception that is no longer needed"


def test_the_rule_sees_every_spelling() -> None:
    for source in ("import time\ntime.time()", "from time import time", "datetime.now()", "datetime.datetime.utcnow()"):
        assert asks_for_the_date(ast.parse(source)), source
    assert asks_for_the_date(ast.parse("path.stat().st_mtime < 3"))
    assert not asks_for_the_date(ast.parse("import time\ntime.monotonic()"))
