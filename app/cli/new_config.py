"""`antiphon init`: a first configuration for one model, to be edited."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml

from adapters.folder import CONFIG_FILE
from app.checkpoint_source import is_hub_id

_TEMPLATE = """\
# Serves {path}. `args` is ours: app/settings*.py lists every field with its default and unit.
# `antiphon check FILE` reports mistakes, `antiphon serve FILE` starts the server.

# On another address than this machine's own, clients need keys (docs/api.md).
http_options: {{host: 127.0.0.1, port: {port}}}

applications:
  - name: antiphon
    import_path: app.builder:build
    route_prefix: /
    args:
      models:
        - name: {name}   # what clients send as `model`
          path: {path}
{adapters}          engine: {{device: {device}}}   # {sizes}

    # Deployments scale independently. `num_replicas: auto` or an `autoscaling_config` replaces a fixed number.
    deployments:
      - {{name: {deployment}, num_replicas: 1}}
"""
_ADAPTERS = "          adapter_folder: {folder}   # every folder in it is an adapter, named after it\n"
_SIZES_BY_DEVICE = {
    "cpu": "for instance dtype, quantization (int8, int4), max_model_len, kv_cache_bytes",
    "cuda": "for instance dtype, quantization (fp8, int4), max_model_len, gpu_memory_fraction",
}
DEVICES = tuple(_SIZES_BY_DEVICE)


def new_config(model: str, *, adapters: str | None = None, device: str = "cpu", port: int = 8000) -> tuple[str, str]:
    """Return the model's public name, and the text of a configuration that serves it.

    Args:
        model: a folder, or a hub id.
        adapters: folder of adapters.
        device: one of `DEVICES`.

    Raises:
        ValueError: `model` is neither or an adapter, or `adapters` is no folder; the message is one line.
    """
    if not Path(model).is_dir() and not is_hub_id(model):
        raise ValueError(f"'{model}' is neither a folder nor a hub id (org/name)")
    if Path(model, CONFIG_FILE).exists():
        raise ValueError(f"'{model}' is an adapter; name its base model, and the folder around it as --adapters")
    if adapters is not None and not Path(adapters).is_dir():
        raise ValueError(f"--adapters: the folder '{adapters}' does not exist")
    # Absolute: the server may be started elsewhere.
    path = model if is_hub_id(model) else str(Path(model).resolve())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name)[:100].strip("-") or "model"
    folder = "" if adapters is None else _ADAPTERS.format(folder=_scalar(str(Path(adapters).resolve())))
    return name, _TEMPLATE.format(
        name=_scalar(name),
        deployment=_scalar(f"Model-{name}"),
        path=_scalar(path),
        adapters=folder,
        device=device,
        sizes=_SIZES_BY_DEVICE[device],
        port=port,
    )


def write_new(path: str, text: str) -> None:
    """Write a file that does not exist yet, whole or not at all.

    Raises:
        FileExistsError: there is something of this name.
        OSError: the folder does not exist, or the text cannot be written to it.
    """
    if os.path.lexists(path):
        raise FileExistsError(path)
    part = Path(f"{path}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _scalar(text: str) -> str:
    """Return a string as YAML; quoted only if it needs to be."""
    if re.fullmatch(r"[\w./-]+", text) and yaml.safe_load(text) == text:
        return text
    # Beyond U+FFFF, JSON escapes each half of a character, and YAML reads two characters.
    return '"' + "".join(char if ord(char) > 0xFFFF else json.dumps(char)[1:-1] for char in text) + '"'
