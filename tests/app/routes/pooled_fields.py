"""Wrong values of the fields that embeddings and classifications share: change of a body, field told, status."""

from __future__ import annotations

WRONG_FIELDS: tuple[tuple[dict[str, object], str, int], ...] = (
    ({"input": None}, "input", 400),
    ({"input": []}, "input", 400),
    ({"input": [[]]}, "input", 400),
    ({"input": [1, "a"]}, "input", 400),
    ({"input": ["a"] * 2049}, "input", 400),
    ({"input": "a" * 6000}, "input", 400),
    ({"model": "nobody"}, "model", 404),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", 400),
)
