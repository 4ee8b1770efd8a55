"""Defaults that a checkpoint's publisher recommends, for what requests and the configuration leave open.

Sampling parameters come from generation_config.json, pooling from the files of sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from app.schemas.common import SamplingOptions
from engine.decoder.json_file import read_json, read_value
from engine.errors import CheckpointError
from engine.request import Pooling

READ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that are read, within the bounds of the request fields."""

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
    try:
        taken = SamplingOptions.model_validate({name: told[name] for name in READ if name in told})
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{path}: {first['loc'][0]} is {first['input']!r}, which no request may have: {first['msg']}. "
            "To do without this file, set 'sampling_defaults: openai' for the model."
        ) from error
    found = taken.model_dump(include=set(READ), exclude_none=True)
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
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
