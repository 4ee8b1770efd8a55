"""The load tests measure any OpenAI-like server: they know the product by HTTP only."""

from __future__ import annotations

from tests.architecture.source_tree import HOUSES, imported_modules, name_of, python_files, syntax_of

ALLOWED = {
    "loadtest/adapter_residency.py": {"engine", "adapters"},
    "loadtest/bench_engine.py": {"engine"},
    "loadtest/cache_tiers.py": {"engine"},
    "loadtest/drafts.py": {"engine"},
    "loadtest/engine_alone.py": {"engine", "adapters"},
    "loadtest/overhead.py": {"engine"},
    "loadtest/perplexity.py": {"engine"},
    "loadtest/routing_fleet.py": {"deployments"},
    "loadtest/routing_policies.py": {"deployments"},
    "loadtest/routing_simulation.py": {"deployments"},
    "loadtest/gpu/engine.py": {"engine", "adapters", "kernels"},
    "loadtest/gpu/__main__.py": {"engine", "kernels"},
    "loadtest/gpu/ahead_of_time.py": {"kernels"},
    "loadtest/gpu/attention.py": {"kernels"},
    "loadtest/gpu/experts.py": {"kernels"},
    "loadtest/gpu/kernels.py": {"engine", "kernels"},
    "loadtest/gpu/launches.py": {"engine", "kernels"},
    "loadtest/gpu/residency.py": {"engine", "adapters"},
    "loadtest/gpu/state_launches.py": {"kernels"},
    "loadtest/gpu/states.py": {"kernels"},
    "loadtest/gpu/sweep.py": {"kernels"},
    "loadtest/gpu/tiers.py": {"engine", "kernels"},
    "loadtest/gpu/timing.py": {"kernels"},
}
"""These run the engine, its kernels, or the choice of a replica, without a server."""


def test_load_tests_import_nothing_of_the_product() -> None:
    culprits = {}
    for path in python_files("loadtest"):
        allowed = ALLOWED.get(name_of(path), set())
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
