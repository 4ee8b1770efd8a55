"""The regular expressions of one adapter's configuration, matched as PEFT does but in bounded time.

PEFT uses Python's `re`, which may backtrack without end and blocks the whole process meanwhile. A pattern that is more
than a plain name is therefore matched by the `regex` package, which takes a timeout and lets other threads run. It is
imported only then: an installation with the engine but without the server may lack it.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

from adapters.errors import AdapterError

if TYPE_CHECKING:
    import regex

MAX_PATTERN_CHARS = 4096
MAX_UNROLLED_CHARS = 100_000
"""Bound on a pattern's length times all its brace counts: compilation unrolls nested repeats."""
MAX_PATTERNS_S = 0.5
"""Thread CPU time to compile and match patterns other than names; typical PEFT ones take microseconds a module."""
NUM_TRIES = 8

WHOLE_NAME = "{}"
END_OF_NAME = r"(.*\.)?({})"
LAYER = r"(?:(?:^|.*?\.){}\.(?P<idx>\d+)\.).*"
"""How PEFT wraps a pattern; each form must match a whole name."""

_NAME = re.compile(r"\^?(?:[\w.]|\\\.){1,256}\$?")
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}|\{,(\d+)\}")


class Patterns:
    """All patterns of one adapter; `name` is used in errors. For one thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left_s = MAX_PATTERNS_S
        self._compiled: dict[tuple[str, str], re.Pattern[str] | regex.Pattern[str]] = {}

    def add(self, field: str, form: str, pattern: str) -> None:
        """Compile a pattern for use in one of the forms above; `field` is named in errors.

        Raises:
            AdapterError: it is not a regular expression, is too long, repeats too often, or takes too long to compile.
        """
        if len(pattern) > MAX_PATTERN_CHARS:
            raise AdapterError(self._name, f"{field} has a pattern longer than {MAX_PATTERN_CHARS} characters")
        unescaped = re.sub(r"\\.", "_", pattern, flags=re.DOTALL)
        counts = [max(1, int(count)) for found in _COUNT.findall(unescaped) for count in found if count]
        # Any other brace starts syntax specific to `regex`.
        if "{" in _COUNT.sub("", unescaped) or len(pattern) * math.prod(counts) > MAX_UNROLLED_CHARS:
            raise AdapterError(self._name, f"{field} has a pattern with braces that hold no counts or too high ones")
        started_s = time.thread_time()
        is_name = _NAME.fullmatch(pattern) is not None
        try:
            self._compiled[form, pattern] = _compile(form.format(pattern), is_name=is_name)
        except (re.error, ValueError, OverflowError, RecursionError):
            raise AdapterError(self._name, f"{field} has a pattern that is not a regular expression") from None
        if not is_name:
            self._spend(started_s)

    def match(self, form: str, pattern: str, module: str) -> re.Match[str] | regex.Match[str] | None:
        """Match a module's name against a pattern that was added for this form.

        Raises:
            AdapterError: the patterns of this adapter have taken too long.
        """
        compiled = self._compiled[form, pattern]
        if isinstance(compiled, re.Pattern):
            return compiled.fullmatch(module)
        for _ in range(NUM_TRIES):
            started_s = time.thread_time()
            try:
                return compiled.fullmatch(module, timeout=self._left_s)
            except TimeoutError:
                # The timeout counts the CPU time of all threads; if others used most of it, try again.
                continue
            finally:
                self._spend(started_s)
        raise self._too_slow()

    def _spend(self, started_s: float) -> None:
        self._left_s -= time.thread_time() - started_s
        if self._left_s <= 0:
            raise self._too_slow()

    def _too_slow(self) -> AdapterError:
        return AdapterError(self._name, f"its patterns take over {MAX_PATTERNS_S} seconds to match")


def _compile(text: str, *, is_name: bool) -> re.Pattern[str] | regex.Pattern[str]:
    """Compile by `re`, which checks the syntax, and also by `regex` unless the pattern is a plain name."""
    compiled = re.compile(text)
    if is_name:
        return compiled
    import regex

    try:
        return regex.compile(text)
    except regex.error as error:
        raise ValueError(str(error)) from error
