"""Whether a grammar can be followed at all, asked before any model has to do with it."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from llguidance import LLMatcher

from deployments.generation import Grammar
from engine.errors import RequestError

MAX_KNOWN = 1024
MAX_REASON_CHARS = 300


async def check_grammar(grammar: Grammar) -> None:
    """Do nothing, off the event loop.

    Raises:
        RequestError: the grammar cannot be followed; names the field that asked for it.
    """
    reason = await asyncio.to_thread(_reason_against, grammar.source)
    if reason:
        raise RequestError(f"'{grammar.field}' cannot be followed: {reason}", field=grammar.field)


@lru_cache(MAX_KNOWN)
def _reason_against(source: str) -> str:
    # Bounded by the library's own limits, a tenth of a second for the largest that a request can hold.
    complaint = LLMatcher.validate_grammar(source)
    return "" if complaint.startswith("WARNING") else " ".join(complaint.split())[:MAX_REASON_CHARS]
