"""The load tests measure any OpenAI-like server: they know the product by HTTP only."""

from __future__ import annotations

from tests.architecture.source_tree import HOUSES, imported_modules, name_of, python_files, syntax_of

MAY_IMPORT_THE_ENGINE = {"loadtest/bench_engine.py", "loadtest/engine_alone.py", "loadtest/perplexity.py"}
"""These run the engine without a server."""


def test_load_tests_import_nothing_of_the_product() -> None:
    culprits = {}
    for path in python_files("loadtest"):
        allowed = {"engine"} if name_of(path) in MAY_IMPORT_THE_ENGINE else set()
        found = {name.split(".")[0] for name in imported_modules(syntax_of(path))} & set(HOUSES)
        if found - allowed:
            culprits[name_of(path)] = sorted(found - allowed)
    assert not culprits


def test_the_locustfile_only_imports_users() -> None:
    (path,) = [path for path in python_files("loadtest") if path.name == "locustfile.py"]
    assert len(path.read_text().splitlines()) <= 30
    assert {name for name in imported_modules(syntax_of(path)) if name.startswith("loadtest")} == {
        "loadtest.users.chat",
        "loadtest.users.chat.ChatUser",
    }
