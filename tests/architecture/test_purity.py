from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.source_tree import ROOT, module_of, python_files

HEAVY = ("torch", "triton", "numpy", "ray", "fastapi", "pydantic", "transformers", "regex")
PURE_FILES = (
    "engine/request.py",
    "engine/config.py",
    "engine/errors.py",
    "engine/machine.py",
    "engine/resolve.py",
    "engine/scheduling/request_bounds.py",
    "engine/step.py",
    "engine/ports.py",
    "engine/scheduling/pacing.py",
    "engine/scheduling/step_costs.py",
    "engine/scheduling/forecast.py",
    "engine/scheduling/admission.py",
    "engine/scheduling/scheduler.py",
    "engine/cache/blocks.py",
    "engine/cache/prefix_index.py",
    "engine/decoder/experts.py",
    "engine/decoder/families.py",
    "engine/decoder/rope.py",
    "engine/decoder/reading.py",
    "engine/decoder/spec.py",
    "engine/decoder/stored_int4.py",
    "deployments/batches/values.py",
    "deployments/batches/lines.py",
    "deployments/batches/result_file.py",
    "deployments/batches/retries.py",
    "deployments/generation.py",
    "deployments/answer_events.py",
    "deployments/config.py",
    "deployments/channel/outbox.py",
    "deployments/channel/token_frames.py",
    "deployments/errors.py",
    "deployments/pooled.py",
    "deployments/generation_calls.py",
    "deployments/gateway/resumption.py",
    "deployments/routing/asked.py",
    "deployments/routing/board.py",
    "deployments/routing/estimate.py",
    "deployments/routing/report.py",
    "adapters/device_slots.py",
    "adapters/errors.py",
    "adapters/folder.py",
    "adapters/identity.py",
    "adapters/patterns.py",
    "adapters/peft_format.py",
    "adapters/registry.py",
    "adapters/tensor_file.py",
    "adapters/tensor_names.py",
    "app/cli/serve_environment.py",
)
PURE_FOLDERS = ("deployments/stream",)
PROBE = """
import importlib, json, sys
modules, looked_for = map(json.loads, sys.argv[1:])
brought = {}
for module in modules:
    importlib.import_module(module)
    if found := sorted(set(looked_for) & set(sys.modules)):
        brought[module] = found
        break
print(json.dumps(brought))
"""


def pure_modules() -> list[str]:
    files = [ROOT / name for name in PURE_FILES]
    for folder in PURE_FOLDERS:
        files.extend(path for path in python_files(folder) if path.name != "__init__.py")
    return [module_of(path) for path in files if path.exists()]


def brought(modules: list[str], *looked_for: str) -> dict[str, list[str]]:
    """Which of some modules come along with the first of others that brings any, imported in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(modules), json.dumps(looked_for)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


def test_pure_modules_bring_only_the_standard_library() -> None:
    """None of them may, so that one interpreter imports them all; the one that is told is the first that does."""
    assert brought(pure_modules(), *HEAVY) == {}


def test_the_builder_brings_nothing_that_only_replicas_need() -> None:
    """Nothing is served before it has been imported, and torch alone takes two seconds."""
    assert brought(["app.builder"], "torch", "triton", "transformers", "huggingface_hub", "sqlalchemy") == {}


def test_every_init_file_is_empty() -> None:
    inits = [path for path in ROOT.rglob("__init__.py") if not {".venv", ".venv-clients"} & {*path.parts}]
    assert inits
    assert [str(path) for path in inits if path.stat().st_size] == []


def test_folders_that_are_data_are_not_packages() -> None:
    assert not (ROOT / "models" / "__init__.py").exists()
    assert not (ROOT / "adapters" / "library" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1:]:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Missing())
import engine.build, engine.gpu.build, loadtest.gpu.__main__
"""


def test_the_engine_and_its_benchmark_need_nothing_of_the_server() -> None:
    """A machine with a GPU may have torch and Triton, and none of these."""
    missing = [
        "ray",
        "fastapi",
        "uvicorn",
        "orjson",
        "llguidance",
        "sqlalchemy",
        "limits",
        "locust",
        "pydantic",
        "regex",
    ]
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, *missing], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
