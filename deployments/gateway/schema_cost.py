"""Find schemas that would take the grammar library time exponential in their size, before it is asked.

The library combines all schemas that apply to one place of a value (by `allOf`, or by `$ref`, `anyOf` and the like
beside other keywords). It then checks that a string can match all patterns at once, and multiplies the alternatives:
each more pattern takes three times as long, each more `anyOf` twice or more. Nothing stops a check that has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import Any
from urllib.parse import unquote

MAX_PATTERNS = 4
"""Different patterns and formats that may apply to one string: four take milliseconds, fourteen 12 s."""
MAX_ALTERNATIVES = 256
"""Combinations of alternatives that may apply to one place."""
MAX_NAME_PATTERNS = 64
"""Patterns of names (`patternProperties`) that may apply to one object: each is compared with all others."""
MAX_STEPS = 200_000
"""Schemas and names that are looked at, about 0.3 s; 64 K characters that combine nothing take half at most."""

_PATTERNS = ("pattern", "format")
_ALTERNATIVES = ("anyOf", "oneOf")


def reason_against(schema: Any) -> str:
    """Return one sentence why a schema is too costly to check, or an empty text."""
    if _is_simple(schema):
        return ""
    try:
        _Places(schema).check()
    except _TooCostlyError as error:
        return str(error)
    return ""


class _TooCostlyError(Exception):
    """The schema exceeds a bound; the message is one sentence."""


def _inner(value: Any) -> Iterator[Any]:
    """Yield a value and all values within, in no certain order."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _is_simple(schema: Any) -> bool:
    """Whether a schema keeps the bounds even if all that it says applied to one place."""
    nodes = [value for value in _inner(schema) if isinstance(value, dict)]
    patterns = {node[name] for node in nodes for name in _PATTERNS if isinstance(node.get(name), str)}
    sizes = (len(node[name]) for node in nodes for name in _ALTERNATIVES if isinstance(node.get(name), list))
    num_names = len(_name_patterns(nodes))
    few = len(patterns) <= MAX_PATTERNS and num_names <= MAX_NAME_PATTERNS
    return few and prod(size for size in sizes if size) <= MAX_ALTERNATIVES


class _Places:
    """Visits each place of the values that a schema describes, with all schemas that apply to it together."""

    def __init__(self, root: Any) -> None:
        self._root = root
        names = ("$id", "id") if "draft-04" in str(_member(root, "$schema")) else ("$id",)
        self._has_ids = any(
            isinstance(_member(value, name), str) for value in _inner(root) if value is not root for name in names
        )
        self._num_steps = 0
        self._seen: set[frozenset[int]] = set()
        self._pending: list[tuple[Any, ...]] = []

    def check(self) -> None:
        """Check all places.

        Raises:
            _TooCostlyError: at one, more than a bound meets.
        """
        self._add((self._root,))
        while self._pending:
            for nodes in self._alternatives(self._pending.pop()):
                _check_patterns(nodes)
                self._add_properties(nodes)
                self._add_items(nodes)

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise _TooCostlyError(f"Its parts combine in too many ways: finding them takes over {MAX_STEPS} steps.")

    def _add(self, nodes: Iterable[Any]) -> None:
        nodes = tuple(node for node in nodes if isinstance(node, dict))
        key = frozenset(map(id, nodes))
        if nodes and key not in self._seen:
            self._seen.add(key)
            self._pending.append(nodes)

    def _alternatives(self, nodes: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """Return the combinations of schemas without alternatives that these come to."""
        found: list[list[dict[str, Any]]] = []
        num_cases: dict[int, int] = {}
        stack: list[tuple[dict[int, dict[str, Any]], list[list[Any]], list[Any]]] = [({}, [], list(nodes))]
        while stack:
            flat, groups, pending = stack.pop()
            self._spend(1 + len(flat) + len(groups))
            while pending:
                node = pending.pop()
                if isinstance(node, dict) and id(node) not in flat:
                    self._spend(1)
                    flat[id(node)] = node
                    pending += self._joined(node)
                    groups += (node[name] for name in _ALTERNATIVES if isinstance(node.get(name), list))
            if not groups:
                found.append(list(flat.values()))
            else:
                group = groups.pop()
                num_cases[id(group)] = len(group)
                stack += ((dict(flat), list(groups), [branch]) for branch in group)
            # The cases of one union, however many, are not multiplied.
            if len(found) + len(stack) > max(MAX_ALTERNATIVES, sum(num_cases.values())):
                raise _TooCostlyError(f"More than {MAX_ALTERNATIVES} combinations of alternatives apply to one value.")
        return found

    def _joined(self, node: dict[str, Any]) -> list[Any]:
        """Return the schemas that apply wherever `node` does."""
        joined = list(node["allOf"]) if isinstance(node.get("allOf"), list) else []
        if isinstance(node.get("$ref"), str):
            joined.append(self._target(node["$ref"]))
        return joined

    def _target(self, reference: str) -> Any:
        """Return the schema that a reference names, or None."""
        if self._has_ids or (reference != "#" and not reference.startswith("#/")):
            raise _TooCostlyError(
                f"With more than {MAX_PATTERNS} patterns or {MAX_ALTERNATIVES} combinations of alternatives, "
                "references must begin with '#/' and no inner schema may have an '$id'."
            )
        target = self._root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and len(key) < 10 and int(key) < len(target):
                target = target[int(key)]
            else:
                target = _member(target, key)
        return target

    def _add_properties(self, nodes: Sequence[dict[str, Any]]) -> None:
        if len(_name_patterns(nodes)) > MAX_NAME_PATTERNS:
            raise _TooCostlyError(f"More than {MAX_NAME_PATTERNS} patterns of names apply to one object.")
        names: set[str] = set(chain.from_iterable(_members(node, "properties") for node in nodes))
        # The name None stands for all others.
        for name in (*names, None):
            options = [_of_property(node, name) for node in nodes]
            self._spend(len(nodes))
            self._add_products(options)

    def _add_products(self, options: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        num_products = prod(map(len, options))
        if num_products > MAX_ALTERNATIVES and sum(len(each) > 1 for each in options) > 1:
            raise _TooCostlyError(f"More than {MAX_ALTERNATIVES} combinations of name patterns apply to one property.")
        self._spend(2 * num_products)
        for choice in product(*options):
            self._add(chain.from_iterable(choice))

    def _add_items(self, nodes: Sequence[dict[str, Any]]) -> None:
        tuples = [_listed(node) for node in nodes]
        for place in range(max(map(len, tuples)) + 1):
            self._spend(len(nodes))
            self._add(
                listed[place] if place < len(listed) else _rest(node)
                for node, listed in zip(nodes, tuples, strict=True)
            )


def _check_patterns(nodes: Sequence[dict[str, Any]]) -> None:
    if len({node[name] for node in nodes for name in _PATTERNS if isinstance(node.get(name), str)}) > MAX_PATTERNS:
        raise _TooCostlyError(f"More than {MAX_PATTERNS} patterns or formats apply to one string.")


def _name_patterns(nodes: Iterable[dict[str, Any]]) -> set[str]:
    return set(chain.from_iterable(_members(node, "patternProperties") for node in nodes))


def _of_property(node: dict[str, Any], name: str | None) -> list[tuple[Any, ...]]:
    """Return the schemas that a node may have for a property: patterns of names exclude each other."""
    properties = _members(node, "properties")
    own = (properties[name],) if name in properties else ()
    by_pattern = [(*own, schema) for schema in _members(node, "patternProperties").values()]
    return [own or (node.get("additionalProperties"),), *by_pattern]


def _listed(node: dict[str, Any]) -> list[Any]:
    """Return the schemas of the first items; older drafts write them as `items`."""
    listed: list[Any] = next((node[name] for name in ("prefixItems", "items") if isinstance(node.get(name), list)), [])
    return listed


def _rest(node: dict[str, Any]) -> Any:
    return node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _members(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}
