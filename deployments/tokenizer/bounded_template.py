"""Chat templates in a sandbox that bounds rendering time and the size of every text a template produces.

Jinja's sandbox isolates the process from a template but does not stop it from running forever. Here every loop and call
checks the deadline, and every piece of text is checked for length. Operations whose output size cannot be bounded in
advance are removed.

**Source:** the extensions and globals are the ones that Hugging Face's templates expect (transformers 5,
`utils/chat_template_utils.py`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

from jinja2 import Environment, Template, TemplateError, meta, nodes, pass_environment
from jinja2.ext import Extension
from jinja2.filters import do_format, do_indent, do_round, do_sum
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RENDER_S = 2.0
_PADDING = re.compile(r"%(\([^)]*\))?[-+ #0]*[\d*.]")
_OF_TEXT = (
    *("capitalize", "e", "escape", "forceescape", "join", "lower", "pprint", "replace", "safe", "string", "striptags"),
    *("title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
"""Filters that convert any value to text."""
_COMPARING = (
    *("dictsort", "groupby", "max", "min", "reject", "rejectattr"),
    *("select", "selectattr", "sort", "unique"),
)
"""Filters that compare values with each other or with their arguments."""
_COMPARISONS = frozenset(
    {
        *("eq", "equalto", "==", "ne", "!=", "in"),
        *("gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<", "le", "<="),
    }
)
"""Tests that compare. With a list that holds one object many times, that takes as long as with many objects."""
_GROWTH = frozenset({"encode", "expandtabs", "to_bytes", "translate"})
"""Methods of str and int whose result size is not checked; no chat template needs them."""
_MAX_DIGITS = 64
"""Largest precision of the filter `round`, which computes that power of ten."""
_MAX_BITS = 4096
"""Maximum size of an integer product; larger products could run past the deadline."""

_BOUNDS: ContextVar[_Bounds] = ContextVar("bounds")


class TemplateBoundError(TemplateError):
    """A template exceeds its time or size bound."""


class BoundedTemplate:
    """One compiled chat template. Thread-safe.

    Args:
        source: the template's text.
        max_chars: bound on the rendered text and on every intermediate text.

    Raises:
        TemplateError: the source is not a valid template.
    """

    def __init__(self, source: str, *, max_chars: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_chars = max_chars
        self._clock = clock
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        for name in (*_OF_TEXT, *_COMPARING):
            environment.filters[name] = _bounded_filter(environment.filters[name])
        for name in ("batch", "center", "slice", "urlize", "wordwrap", "xmlattr"):
            del environment.filters[name]
        environment.filters |= {"format": _format, "indent": _indent, "round": _round, "sum": _sum, "tojson": _to_json}
        bounded = {"bounded_items": _bounded_items, "bounded_size": _bounded_size, "bounded_text": _bounded_text}
        environment.filters |= bounded
        del environment.globals["lipsum"]
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        self.source = source
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            code = environment.compile(_Bounded().visit(tree))
        except (RecursionError, MemoryError):
            raise TemplateBoundError("it is nested too deep") from None
        except SyntaxError as error:
            # Of Python, to which Jinja translates: it nests loops less deep, and has no `break` outside of them.
            raise TemplateError(f"it cannot be compiled ({error.msg})") from error
        self._template: Template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text.

        Raises:
            TemplateBoundError: rendering takes too long or produces too much text.
            TemplateError: the template rejects the variables or fails on them.
        """
        token = _BOUNDS.set(_Bounds(self._clock, self._clock() + MAX_RENDER_S, self._max_chars))
        try:
            return self._render(variables)
        finally:
            _BOUNDS.reset(token)

    def _render(self, variables: dict[str, Any]) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                _BOUNDS.get().check(num_chars)
                pieces.append(piece)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateBoundError("it is nested too deep") from None
        except MemoryError:
            raise TemplateBoundError("it takes too much memory") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, AssertionError) as error:
            # The template's expressions fail on values that it was not written for.
            raise TemplateError(f"it fails on them ({type(error).__name__})") from error
        return "".join(pieces)


@dataclass(frozen=True, slots=True)
class _Bounds:
    clock: Callable[[], float]
    deadline_s: float
    max_chars: int

    def check(self, size: int = 0) -> None:
        if size > self.max_chars:
            raise TemplateBoundError(f"it makes more than {self.max_chars} characters")
        if self.clock() > self.deadline_s:
            raise TemplateBoundError("it takes too long")


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of an operator's result before computing it."""
        bounds = _BOUNDS.get()
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateBoundError(f"it has the operator {operator}")
        if operator == "*":
            bounds.check(_size(left) * abs(right) if isinstance(right, int) else 0)
            bounds.check(_size(right) * abs(left) if isinstance(left, int) else 0)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise TemplateBoundError("it multiplies numbers that are too large")
        else:
            bounds.check(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the deadline before each call, and the result size of str methods."""
        _BOUNDS.get().check()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int) and __obj.__name__ in _GROWTH:
            raise TemplateBoundError(f"it has the method {__obj.__name__}")
        if isinstance(owner, str):
            _check_growth(owner, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse `str.format`, whose format strings can pad without bound."""
        if super().wrap_str_format(value) is not None:
            raise TemplateBoundError("it has the method format")
        return None


class _Bounded(NodeTransformer):
    """Inserts a check into every loop and around every concatenation, comparison, output expression and filter."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), "bounded_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "bounded_text") for part in node.nodes]
        return _filtered(node, "bounded_text")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "bounded_text")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "bounded_text")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:
        self.generic_visit(node)
        if node.name in _COMPARISONS:
            node.node = _filtered(node.node, "bounded_text")
            node.args = [_filtered(argument, "bounded_text") for argument in node.args]
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [n if isinstance(n, nodes.TemplateData) else _filtered(n, "bounded_text") for n in node.nodes]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        # A filter block has no node: Jinja itself passes the block's text, which is checked as output.
        return node if node.node is None else _filtered(node, "bounded_size")


class _Generation(Extension):
    """`{% generation %}`, which marks text that a model is trained on. Here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block and return its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded_items(items: Iterable[Any]) -> Iterator[Any]:
    bounds = _BOUNDS.get()
    for item in items:
        bounds.check()
        yield item


def _bounded_size(value: Any) -> Any:
    _BOUNDS.get().check(_size(value))
    return value


def _bounded_text(value: Any) -> Any:
    _check_text(value)
    return value


def _bounded_filter(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)  # also copies the attributes that tell Jinja which first argument to pass
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = [list(value) if isinstance(value, Iterator) else value for value in args]
        for value in given:
            _check_text(value)
        _check_growth(*(value for value in (*given, *kwargs.values()) if isinstance(value, str | int | list | tuple)))
        return apply(*given, **kwargs)

    return bounded


def _indent(text: Any, width: int | str = 4, *args: Any, **kwargs: Any) -> str:
    _check_text(text)
    text, margin = str(text), len(width) if isinstance(width, str) else width
    _BOUNDS.get().check(len(text) + margin * (1 + len(text.splitlines())))
    return do_indent(text, width, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_DIGITS:
        raise TemplateBoundError(f"it rounds to more than {_MAX_DIGITS} digits")
    return do_round(value, precision, method)


@pass_environment
def _sum(environment: Environment, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise TemplateBoundError("it sums values that are not numbers")
    return do_sum(environment, items, attribute, start)


def _format(layout: Any, *values: Any, **named: Any) -> str:
    if _PADDING.search(str(layout)):
        raise TemplateBoundError("it pads with the filter format")
    for value in (*values, *named.values()):
        _check_text(value)
    return do_format(layout, *values, **named)


def _check_growth(*values: Any) -> None:
    """Check an upper bound on the result of padding, replacing or joining these values."""
    bounds = _BOUNDS.get()
    widths = [abs(value) for value in values if isinstance(value, int)]
    texts = [len(value) for value in values if isinstance(value, str)]
    items = [sum(_size(item) for item in value) + len(value) for value in values if isinstance(value, list | tuple)]
    bounds.check(max(widths, default=0))
    bounds.check(max(texts, default=0))
    bounds.check(sum(items))
    if len(texts) >= 3:  # replace(): every occurrence of the second text in the first becomes the third
        bounds.check(texts[0] * texts[2] // max(1, texts[1]))
    for value in values:
        if isinstance(value, list | tuple) and texts:
            bounds.check(len(value) * texts[0])


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_text(value: Any, *, per_item: int = 0, per_depth: int = 0) -> None:
    """Check the size of a value converted to text. A small value that references one object many times can expand.

    Args:
        per_item, per_depth: extra characters per item, and per item and nesting level.
    """
    bounds, size, left = _BOUNDS.get(), 0, [(value, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | tuple | dict):
            size += len(item) * (1 + per_item + per_depth * (depth + 1))
            bounds.check(size)
            inner = (*item, *item.values()) if isinstance(item, dict) else item
            left += [(one, depth + 1) for one in inner]
    bounds.check(size)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    margin = indent if isinstance(indent, int) else len(indent or "")
    _check_text(value, per_item=sum(map(len, separators or ())), per_depth=margin)
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
