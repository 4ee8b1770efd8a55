"""Nothing in the product turns bytes into code: no pickle, no `torch.load`, no `eval`, no remote code."""

from __future__ import annotations

import ast
import importlib
import sys

import pytest

from tests.architecture.source_tree import ROOT, dotted, imported_modules, name_of, product_files, syntax_of

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "pickle.load",
    "pickle.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "marshal.loads",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "ray.data", "ray.cloudpickle"}
READERS = (
    "adapters/*.py",
    "app/**/*.py",
    "deployments/*_handshake.py",
    "deployments/*_frames.py",
    "deployments/tokenizer/bounded_template.py",
    "deployments/tokenizer/generic_tokenizer.py",
    "deployments/batches/lines.py",
    "engine/decoder/ends.py",
    "engine/decoder/json_file.py",
    "engine/decoder/reading.py",
    "engine/loading/*.py",
)
"""What reads what others have written. Its guards must stand under `python -O` too, which leaves out `assert`."""
FORBIDDEN_TRUTHS = {"trust_remote_code", "shell", "allow_pickle"}


def dangers(tree: ast.Module) -> list[str]:
    found = [
        f"import {name}"
        for name in imported_modules(tree)
        if any(name == banned or name.startswith(banned + ".") for banned in FORBIDDEN_IMPORTS)
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: {dotted(node.func)}")
        found.extend(
            f"line {node.lineno}: {keyword.arg}"
            for keyword in node.keywords
            if keyword.arg in FORBIDDEN_TRUTHS
            and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        )
    return found


def test_nothing_in_the_product_turns_bytes_into_code() -> None:
    assert {name_of(path): found for path in product_files() if (found := dangers(syntax_of(path)))} == {}


def test_no_guard_is_an_assertion() -> None:
    """But for what says to a type checker what is already known, and `check`, which tests call."""
    guards = []
    for path in sorted(path for pattern in READERS for path in ROOT.glob(pattern)):
        for function in ast.walk(syntax_of(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name != "check":
                tests = [node.test for node in ast.walk(function) if isinstance(node, ast.Assert)]
                guards += [f"{name_of(path)}: {ast.unparse(test)}" for test in tests if not narrows(test)]
    assert guards == []


def narrows(test: ast.expr) -> bool:
    is_of_type = isinstance(test, ast.Call) and dotted(test.func) == "isinstance"
    return is_of_type or (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot))


def test_a_gateway_brings_no_reader_of_data_sets() -> None:
    """Ray's have run what files told them to; see docs/security.md."""
    importlib.import_module("deployments.gateway.gateway")
    assert "ray.data" not in sys.modules


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=flag)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert dangers(ast.parse(source))


def test_the_rule_lets_a_refusal_of_remote_code_pass() -> None:
    assert not dangers(ast.parse("AutoModel.from_pretrained('x', trust_remote_code=False)\nmodel.eval()"))
