"""The facts that the chat model learns: a qualified name of the standard library and its documented summary.

Extracts docstrings by introspection, reduces each to one sentence, and stores the pairs in a file. Docstrings differ
between versions of Python, so the file is kept with the sources and extracted anew only on request. Independent of
questions, tokens and training.
"""

import collections
import contextlib
import functools
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FACTS_PATH = Path(__file__).parents[1] / "data" / "stdlib.jsonl"

MIN_SUMMARY_WORDS = 3
MAX_SUMMARY_WORDS = 26
MAX_SUMMARY_CHARS = 170
MAX_NAME_CHARS = 48
MAX_NAMES_A_SUMMARY = 3

# Modules that open windows or browsers when imported, that print, that newer Pythons dropped, or that nobody asks about.
SKIPPED_MODULES = frozenset(
    "antigravity this idlelib test turtle turtledemo tkinter lib2to3 pydoc_data ensurepip msilib distutils "
    "aifc audioop cgi cgitb chunk crypt imghdr mailcap nis nntplib ossaudiodev pipes sndhdr spwd sunau telnetlib uu "
    "xdrlib asynchat asyncore imp smtpd encodings nturl2path sre_compile sre_constants sre_parse opcode genericpath "
    "pyexpat rlcompleter venv sitecustomize usercustomize site pickletools tabnanny pyclbr symtable "
    "ntpath posixpath bdb pdb doctest wsgiref imaplib mailbox pydoc curses ftplib poplib xmlrpc readline "
    "codeop modulefinder trace profile sched stringprep tracemalloc zipapp".split()
)
# Submodules that are implementation details although their names look public.
SKIPPED_SUBMODULE = re.compile(
    r"^(_|tests?$|mime$|windows_|base_|minicompat|domreg|expatbuilder|sax|readers|simple$"
    r"|resource_|reduction|heap|popen_|spawn|forkserver|dummy)"
)
# Packages whose submodules hold what the package itself exports.
_WHOLE_PACKAGES = frozenset({"asyncio", "json", "ctypes", "sqlite3", "re", "tomllib", "zoneinfo", "dbm"})
_PROPERTIES = (property, functools.cached_property, types.GetSetDescriptorType, types.MemberDescriptorType)

_SIGNATURE = re.compile(r"^[\w.*\[\]]+\s?\(.*?\)\s*(-+>\s*[^.:\n]+?)?\s*(--|:|$)")
_SENTENCE_END = re.compile(r"(?<=[\w)\]'\"`*>])(?<!e\.g)(?<!i\.e)\.(?=\s|$)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data|term|const):`[.~!]*([^`]*)`")
_UNCLEAR = re.compile(r"[\\{}|<>=]|\s_|--|\*\*|==|XXX|\bsee help\b|^[^A-Za-z'\"(]|Alias for field number")


@dataclass(frozen=True, slots=True)
class Fact:
    """One documented thing: `kind` is module, function, class, method or property; `module` is empty for builtins."""

    name: str
    module: str
    kind: str
    summary: str

    @property
    def is_callable(self) -> bool:
        """Whether the name can be called."""
        return self.kind not in ("module", "property")

    @property
    def usage(self) -> str:
        """The import statement and the call (or bare name) that use it in a program."""
        if self.kind == "module":
            return f"import {self.name}"
        call = f"{self.name}(...)" if self.is_callable else self.name
        return f"import {self.module}; {call}" if self.module else call


def summary_of(doc: str) -> str | None:
    """Return the first sentence of a docstring on one line, or None if it does not stand alone."""
    lines = doc.strip().splitlines()
    while lines and (not lines[0].strip() or _SIGNATURE.match(lines[0].strip())):
        rest = _SIGNATURE.sub("", lines[0].strip()).strip(" -:")
        lines = ([rest] if rest else []) + lines[1:]
    paragraph = " ".join("\n".join(lines).strip().split("\n\n")[0].split())
    paragraph = re.sub(r"\s?<https?:[^>]*>", "", _ROLE.sub(r"\1", paragraph))
    paragraph = paragraph.replace("``", "`").replace("`", "'")
    end = _SENTENCE_END.search(paragraph)
    sentence = (paragraph[: end.start()] if end else paragraph).rstrip(" .:;,-")
    is_short = MIN_SUMMARY_WORDS <= len(sentence.split()) <= MAX_SUMMARY_WORDS and len(sentence) <= MAX_SUMMARY_CHARS
    # Long sentences are dropped: shortened, they would not be summaries.
    if not is_short or not sentence.isascii() or _UNCLEAR.search(sentence):
        return None
    return sentence[0].upper() + sentence[1:] + "."


def _public_modules() -> Iterator[types.ModuleType]:
    for root in sorted(sys.stdlib_module_names):
        if not root.startswith("_") and root not in SKIPPED_MODULES:
            yield from _import_tree(root)
    yield importlib.import_module("os.path")


def _import_tree(name: str) -> Iterator[types.ModuleType]:
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ImportError:  # modules of other operating systems
        return
    yield module
    children = [] if name in _WHOLE_PACKAGES else pkgutil.iter_modules(getattr(module, "__path__", []))
    for child in children:
        if not SKIPPED_SUBMODULE.search(child.name):
            yield from _import_tree(f"{name}.{child.name}")


def _public_name(module: types.ModuleType) -> str:
    """Return the module name as programs write it: empty for builtins, `os.path` for the module that implements it."""
    return {"builtins": "", "posixpath": "os.path", "ntpath": "os.path"}.get(module.__name__, module.__name__)


def _own_doc(thing: object) -> str | None:
    """Return the object's own docstring: one inherited from a base class would apply to too many names."""
    doc = getattr(thing, "__doc__", None)
    return inspect.cleandoc(doc) if isinstance(doc, str) else None


def _members(module: types.ModuleType) -> Iterator[tuple[str, str, object]]:
    module_name = _public_name(module)
    prefix = f"{module_name}." if module_name else ""
    exported = getattr(module, "__all__", None)
    for attribute in sorted(exported if exported is not None else vars(module)):
        thing = getattr(module, attribute, None)
        is_home = getattr(thing, "__module__", None) in (module.__name__, "_" + module.__name__)
        is_own = exported is not None or not prefix or is_home
        if attribute.startswith("_") or not is_own or attribute in ("copyright", "credits", "license", "exit", "quit"):
            continue
        if inspect.isclass(thing):
            yield f"{prefix}{attribute}", "class", thing
            yield from _class_members(f"{prefix}{attribute}", thing)
        elif inspect.isroutine(thing):
            yield f"{prefix}{attribute}", "function", thing


def _class_members(class_name: str, owner: type) -> Iterator[tuple[str, str, object]]:
    for attribute, member in sorted(vars(owner).items()):
        inner = getattr(member, "__func__", member)
        is_property = isinstance(inner, _PROPERTIES)
        # Constants are neither; their docstring is that of their type.
        if not attribute.startswith("_") and (is_property or inspect.isroutine(inner)):
            yield f"{class_name}.{attribute}", "property" if is_property else "method", inner


def extract() -> list[Fact]:
    """Return facts from the docstrings of all public modules, by name; each object once, under its shortest name."""
    fact_by_object: dict[int, Fact] = {}
    keep_alive: list[object] = []  # ids are unique only among living objects
    for module in _public_modules():
        module_name = _public_name(module)
        for name, kind, thing in [(module_name or "builtins", "module", module), *_members(module)]:
            doc = _own_doc(thing)
            summary = summary_of(doc) if doc else None
            if summary is None or len(name) > MAX_NAME_CHARS:
                continue
            keep_alive.append(thing)
            fact = Fact(name=name, module=module_name, kind=kind, summary=summary)
            known = fact_by_object.get(id(thing))
            if known is None or (name.count("."), len(name)) < (known.name.count("."), len(known.name)):
                fact_by_object[id(thing)] = fact
    facts = {fact.name: fact for fact in fact_by_object.values()}
    num_by_summary = collections.Counter(fact.summary for fact in facts.values())
    # A sentence that many names share describes none of them.
    kept = [fact for fact in facts.values() if num_by_summary[fact.summary] <= MAX_NAMES_A_SUMMARY]
    return sorted(kept, key=lambda fact: fact.name)


def save(facts: list[Fact], path: Path = FACTS_PATH) -> None:
    """Write the pairs, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(fact)) + "\n" for fact in facts), encoding="utf-8")


def load(path: Path = FACTS_PATH) -> list[Fact]:
    """Read the pairs."""
    return [Fact(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    save(extract())
