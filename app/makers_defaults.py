"""How a checkpoint's makers would have it sampled: what a request leaves open is that of generation_config.json."""

from __future__ import annotations

from pathlib import Path

from engine.decoder.json_file import read_json
from engine.errors import CheckpointError

BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Of what is taken from there, as of the same fields of a request."""


def read_defaults(model_path: str) -> dict[str, float]:
    """Return the parameters that a checkpoint names, by the names of `engine.request.SamplingParams`.

    Raises:
        CheckpointError: the file is broken, or a request could not say what it says.
    """
    path = Path(model_path) / "generation_config.json"
    told = read_json(path) if path.is_file() else {}
    found: dict[str, float] = {}
    for name, (least, most) in BOUNDS.items():
        value = told.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not is_number or not least <= value <= most:
            raise CheckpointError(f"{path}: {name} is {value!r}; numbers from {least:g} to {most:g} are taken.")
        found[name] = max(0, value) if name == "top_k" else float(value)
    return found
