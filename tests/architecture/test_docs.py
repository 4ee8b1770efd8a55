"""Prose that names a file or a symbol is true: what stands in backticks exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from app.cli.config_lint import lint_config
from tests.architecture.source_tree import HOUSES, ROOT, syntax_of

TOP_FOLDERS = (*HOUSES, "loadtest", "tests", "models", "docs", "examples")
SYMBOL = re.compile(rf"^(?:{'|'.join((*HOUSES, 'loadtest'))})(?:\.[A-Za-z_]\w*)+$")
FILE = re.compile(rf"^(?:(?:{'|'.join(TOP_FOLDERS)})/)?[\w.-]+(?:/[\w.-]+)*\.(?:py|yaml|toml|md|lock|jsonl|json)$")
FOLDER = re.compile(rf"^(?:{'|'.join(TOP_FOLDERS)})(?:/[\w.-]+)*/$")
NAMED_TEST = re.compile(r"`(test_\w+)::([Tt]est\w+)`")
MODULE_RUN = re.compile(r"python -m ((?:loadtest|app|models)(?:\.\w+)+)")
PARTS_OF_OTHER_FOLDERS = {
    "config.json",
    "tokenizer.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "openapi.json",
    "__init__.py",
}
"""Names of files inside checkpoints and packages, not at the root of this repository."""

BUNDLED_BY_README = {
    "max_model_len: 8192": "max_model_len: 2048",
    "/models/Llama-3.2-1B-Instruct": "models/stdlib-chat",
    "/models/adapters": "adapters/library",
    "/models/support-lora": "adapters/library/markdown",
}


def documents() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found.extend(path for house in (*HOUSES, "loadtest") for path in (ROOT / house).glob("*.md"))
    return [path for path in found if path.exists()]


@pytest.mark.parametrize(("document", "num_rows"), [("faults.md", 36), ("security.md", 44)])
def test_the_tests_that_a_table_names_exist_and_every_row_has_one_or_says_so(document: str, num_rows: int) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|(.*)\|$", text, re.M)
    assert [int(number) for numbers, _ in rows for number in numbers.split(", ")] == list(range(1, num_rows + 1))
    assert [numbers for numbers, told in rows if not re.search(r"`test_|\bas \d|\*\*not shown", told)] == []
    for file, test in NAMED_TEST.findall(text):
        assert any(test in names_defined_in(path) for path in (ROOT / "tests").rglob(f"{file}.py")), f"{file}::{test}"


@cache
def names_defined_in(path: Path) -> frozenset[str]:
    """Classes, functions, assigned names and attributes of a module, as `name` and `Class.name`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(syntax_of(path).body, "")
    return frozenset(names)


def is_living_symbol(symbol: str) -> bool:
    parts = symbol.split(".")
    for cut in range(len(parts), 0, -1):
        module = ROOT.joinpath(*parts[:cut])
        if module.with_suffix(".py").exists():
            rest = ".".join(parts[cut:])
            return not rest or rest in names_defined_in(module.with_suffix(".py"))
        if module.is_dir():
            return cut == len(parts)
    return False


def words_in_backticks(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return [match.group(1).strip().removesuffix("()") for match in re.finditer(r"`([^`\n]+)`", prose)]


def dead_names(text: str, folder: Path) -> list[str]:
    dead = []
    for word in words_in_backticks(text):
        if FILE.match(word) and word not in PARTS_OF_OTHER_FOLDERS:
            is_dead = not (ROOT / word).exists() and not (folder / word).exists()
        elif FOLDER.match(word):
            is_dead = not (ROOT / word).is_dir()
        else:
            is_dead = bool(SYMBOL.match(word)) and not is_living_symbol(word)
        if is_dead:
            dead.append(word)
    dead.extend(module for module in MODULE_RUN.findall(text) if not is_living_symbol(module))
    return dead


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_names_living_things(path: Path) -> None:
    assert dead_names(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    dead = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert dead == []


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {name for path in documents() for name in re.findall(r"`?make ([a-z][a-z-]*)`", path.read_text())}
    assert named - targets == set()


def test_the_configuration_in_the_readme_is_good_with_folders_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that does not exist hides other mistakes: one was that the server would have been open to anyone."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    for block in blocks:
        path = tmp_path / "config.yaml"
        for named, bundled in BUNDLED_BY_README.items():
            block = block.replace(named, bundled)
        path.write_text(block, encoding="utf-8")
        assert lint_config(path) == []


def test_the_check_notices_dead_names() -> None:
    text = "`engine.request.Request` `engine.request.Sequence_` `engine/nowhere.py` `engine.gone` `docs/gone.md`"
    assert dead_names(text, ROOT) == ["engine.request.Sequence_", "engine/nowhere.py", "engine.gone", "docs/gone.md"]
