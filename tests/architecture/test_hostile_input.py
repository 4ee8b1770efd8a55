"""Nothing in the product turns bytes into code: no pickle, no `torch.load`, no `eval`, no remote code."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import dotted, imported_modules, name_of, product_files, syntax_of

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
