"""Makes `json_schema_suite.json` of a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite.

    python tests/contract/trim_json_schema_suite.py <checkout> <commit> > tests/contract/json_schema_suite.json

The cases of draft 2020-12, one a line; of words that no grammar of ours follows the first one only. `format.json` is
left out: its formats say nothing, ours are kept to. The suite is under the MIT licence, copyright Julian Berman.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NOT_FOLLOWED = (
    *("contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dynamicRef", "if-then-else"),
    *("not", "propertyNames", "refRemote", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "vocabulary"),
)
OPTIONAL = ("bignum", "ecmascript-regex", "float-overflow", "id", "no-schema", "non-bmp-regex", "refOfUnknownKeyword")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")


def main(checkout: str, commit: str) -> None:
    """Print the cases that are kept."""
    folder = Path(checkout) / "tests" / "draft2020-12"
    names = sorted(path.stem for path in folder.glob("*.json") if path.stem != "format")
    names += [f"optional/{name}" for name in OPTIONAL] + [f"optional/format/{name}" for name in FORMATS]
    lines = [json.dumps(f"github.com/json-schema-org/JSON-Schema-Test-Suite {commit}, MIT")]
    for name in names:
        cases = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for case in cases[:1] if name in NOT_FOLLOWED else cases:
            tests = {test["description"]: [test["data"], test["valid"]] for test in case["tests"]}
            lines.append(json.dumps([name, case["description"], case["schema"], tests]))
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    main(*sys.argv[1:])
