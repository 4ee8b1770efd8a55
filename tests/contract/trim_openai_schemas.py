"""Makes `openai_schemas.json` of OpenAI's description of its API, `openapi.json` of github.com/openai/openai-openapi.

    python tests/contract/trim_openai_schemas.py openapi.json <commit> > tests/contract/openai_schemas.json

The schemas of the answers that we give too, with all that they refer to, without what validates nothing; one a line.
OpenAI's description is under the MIT licence, copyright OpenAI (https://openai.com).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "Response",
    "ResponseStreamEvent",
    "CreateEmbeddingResponse",
    "CreateModerationResponse",
    "ListModelsResponse",
    "Model",
    "ListFilesResponse",
    "OpenAIFile",
    "DeleteFileResponse",
    "ListBatchesResponse",
    "Batch",
    "ErrorResponse",
)
SAYS_NOTHING = frozenset(
    ("description", "title", "example", "examples", "default", "deprecated", "externalDocs", "discriminator")
)


def trimmed(value: Any, *, is_schema: bool = True) -> Any:
    """Return a schema, or a part of one, without annotations; `is_schema` tells keywords from names of properties."""
    if isinstance(value, list):
        return [trimmed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: trimmed(item, is_schema=not (is_schema and key == "properties"))
        for key, item in value.items()
        if not (is_schema and (key in SAYS_NOTHING or key.startswith("x-")))
    }


def named(value: Any) -> Iterator[str]:
    """Yield the names of the schemas that one refers to."""
    if isinstance(value, list):
        for item in value:
            yield from named(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from [item.rpartition("/")[2]] if key == "$ref" else named(item)


def main(source: str, commit: str) -> None:
    """Print the schemas that are needed."""
    published = json.loads(Path(source).read_text(encoding="utf-8"))["components"]["schemas"]
    kept: dict[str, Any] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name not in kept:
            kept[name] = trimmed(published[name])
            todo += named(kept[name])
    kept = {"$comment": f"github.com/openai/openai-openapi {commit}, MIT; made by trim_openai_schemas.py"} | dict(
        sorted(kept.items())
    )
    lines = (f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in kept.items())
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main(*sys.argv[1:])
