"""Defaults that a checkpoint's publisher recommends, for what requests and the configuration leave open.

Sampling parameters come from generation_config.json, pooling from the files of sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path

from engine.decoder.json_file import read_json, read_value
from engine.errors import CheckpointError
from engine.request import Pooling

BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Bounds of the parameters that are read, equal to those of the request fields."""

MODULES, POOLING, LIBRARY = "modules.json", "Pooling", "sentence_transformers."
COMPUTED = ("Transformer", POOLING, "Normalize")
"""Supported modules; others would change the vectors."""
_POOLING_BY_MODE = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
}
_MEND = "To pool otherwise, set 'pooling' for the model."


def read_defaults(model_path: str) -> dict[str, float]:
    """Return the sampling parameters of a checkpoint, by the names of `engine.request.SamplingParams`.

    Raises:
        CheckpointError: the file is broken, or a value is outside the bounds of requests.
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
            raise CheckpointError(
                f"{path}: {name} is {value!r}; numbers from {least:g} to {most:g} are taken. "
                "To do without this file, set 'sampling_defaults: openai' for the model."
            )
        found[name] = max(0, value) if name == "top_k" else float(value)
    return found


def read_pooling(model_path: str) -> Pooling:
    """Return how a checkpoint pools hidden states into a vector; by default, it uses the last token's.

    Raises:
        CheckpointError: the files are broken, or name an unsupported module or mode; the setting `pooling` avoids this.
    """
    folder = Path(model_path)
    if not (folder / MODULES).is_file():
        return Pooling.LAST
    modules, found = read_value(folder / MODULES), Pooling.LAST
    if not isinstance(modules, list):
        raise CheckpointError(f"{folder / MODULES}: must hold a JSON array.")
    for module in modules:
        kind = str(module.get("type")) if isinstance(module, dict) else repr(module)
        # A module of the checkpoint's own code, such as custom_st.Transformer, may compute anything.
        is_known = kind.startswith(LIBRARY)
        kind = kind.rpartition(".")[2] if is_known else kind
        if not is_known or kind not in COMPUTED:
            raise CheckpointError(
                f"{folder / MODULES}: a {kind} is not computed; those of {', '.join(COMPUTED)} are. {_MEND}"
            )
        if kind == POOLING:
            found = _mode(folder / str(module.get("path")) / "config.json")
    return found


def _mode(path: Path) -> Pooling:
    config = read_json(path)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = modes or [str(config.get("pooling_mode"))]
    if len(modes) > 1 or modes[0] not in _POOLING_BY_MODE:
        raise CheckpointError(f"{path}: {' and '.join(modes)} is not computed; lasttoken and mean are. {_MEND}")
    return _POOLING_BY_MODE[modes[0]]
