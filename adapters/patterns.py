"""The regular expressions of one adapter's configuration: they mean what they mean to PEFT, within a bound of time.

PEFT matches by Python's `re`, which backtracks, for ever where a pattern wants it, and stops the whole process
meanwhile. What is more than a name is therefore matched by the `regex` package, which takes a limit and lets other
threads run. It is imported for that only: a machine that has the engine without the server may lack it.
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
"""Of a pattern, times all its counts in braces: compiled, repeats of repeats are written out."""
MAX_PATTERNS_S = 0.5
"""Of this thread, to compile and match what is more than a name; PEFT's own take microseconds a module."""
NUM_TRIES = 8

WHOLE_NAME = "{}"
END_OF_NAME = r"(.*\.)?({})"
LAYER = r"(?:(?:^|.*?\.){}\.(?P<idx>\d+)\.).*"
"""What PEFT makes of a pattern, each to match a whole name with."""

_NAME = re.compile(r"\^?(?:[\w.]|\\\.){1,256}\$?")
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}|\{,(\d+)\}")


class Patterns:
    """All patterns of one adapter, whose name is what errors call it. For one thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left_s = MAX_PATTERNS_S
        self._compiled: dict[tuple[str, str], re.Pattern[str] | regex.Pattern[str]] = {}

    def add(self, field: str, form: str, pattern: str) -> None:
        """Compile a pattern that is to be used in one of the forms above.

        Raises:
            AdapterError: it is no regular expression, or would take too much.
        """
        if len(pattern) > MAX_PATTERN_CHARS:
            raise AdapterError(self._name, f"{field} has a pattern longer than {MAX_PATTERN_CHARS} characters")
        unescaped = re.sub(r"\\.", "_", pattern, flags=re.DOTALL)
        counts = [max(1, int(count)) for found in _COUNT.findall(unescaped) for count in found if count]
        # Any other brace begins a syntax that is `regex`'s own.
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
        """Match a module's name by a pattern that was added for this form.

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
                # Its limit is of the time of all threads: where others have had most of it, this one tries again.
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
    """Compile what is a regular expression to Python, and what is more than a name by `regex`."""
    compiled = re.compile(text)
    if is_name:
        return compiled
    import regex

    try:
        return regex.compile(text)
    except regex.error as error:
        raise ValueError(str(error)) from error
