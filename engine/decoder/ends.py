"""Which tokens end a generation, read from a checkpoint's files.

generation_config.json overrides config.json. The tokenizer's EOS token counts too: many fine-tuned checkpoints define
a new one there and leave the other files unchanged, and their answers would never end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.decoder.json_file import read_json
from engine.errors import CheckpointError

MAX_TOKENIZER_BYTES = 1 << 28


def eos_ids(folder: Path, config: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    """Return the ids, those of the configuration first; ids outside the vocabulary are dropped.

    Raises:
        CheckpointError: a file is broken, or eos_token_id holds something other than token ids.
    """
    path = folder / "generation_config.json"
    value = (read_json(path) if path.is_file() else {}).get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    told = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in told):
        raise CheckpointError(f"{folder}: eos_token_id must be token ids, it is {value!r}.")
    ids: list[int] = [*told, *_tokenizer_end(folder)]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def _tokenizer_end(folder: Path) -> list[int]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    end = settings.get("eos_token")
    text = end.get("content") if isinstance(end, Mapping) else end
    if not isinstance(text, str):
        return []
    decoder = settings.get("added_tokens_decoder")
    pairs = list(decoder.items()) if isinstance(decoder, Mapping) else []
    if not pairs and (path := folder / "tokenizer.json").is_file():
        added = read_json(path, max_bytes=MAX_TOKENIZER_BYTES).get("added_tokens")
        tokens = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
        pairs = [(token.get("id"), token) for token in tokens]
    texts = {str(token_id): token.get("content") for token_id, token in pairs if isinstance(token, Mapping)}
    return [int(token_id) for token_id, content in texts.items() if content == text and token_id.isdecimal()][:1]
