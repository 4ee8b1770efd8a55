"""Regular expressions that find one of many words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the words at a place.

    Words that begin alike share their beginnings, so that a place is compared with a few of them, not with all.
    """
    return re.compile(_shared(words) or r"(?!)")


def _shared(words: Iterable[str]) -> str:
    alike: dict[str, list[str]] = defaultdict(list)
    for word in words:
        alike[word[:1]].append(word)
    # One of the words ends here, and the others go on.
    is_end = alike.pop("", None) is not None
    if not alike:
        return ""
    return f"(?:{'|'.join(map(_begun_alike, alike.values()))}){'?' if is_end else ''}"


def _begun_alike(words: list[str]) -> str:
    # What the first and the last in order have in common, all have.
    first, last = min(words), max(words)
    length = next(
        (place for place, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first)
    )
    return re.escape(first[:length]) + _shared(word[length:] for word in words)
