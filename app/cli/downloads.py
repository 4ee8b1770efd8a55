"""Download what a config file names by Hugging Face hub ids, before the server starts.

Otherwise a worker of Ray downloads it during the start, where neither its progress nor its errors show well.
"""

from __future__ import annotations

from pathlib import Path

from app.checkpoint_source import is_hub_id, local_folder
from app.cli.config_file import read_config
from app.cli.config_lint import settings_by_place, source_folders
from engine.errors import CheckpointError


def hub_ids(path: str | Path) -> dict[str, str]:
    """Return the hub ids in a valid config file, with the place of each in the file."""
    place_by_id: dict[str, str] = {}
    for args, settings in settings_by_place(read_config(path)).items():
        for place, folder in source_folders(settings, args).items():
            if is_hub_id(folder):
                place_by_id.setdefault(folder, place)
    return place_by_id


def fetch(path: str | Path) -> list[str]:
    """Download all hub ids of a valid config file, with progress bars; return a line for each that fails."""
    lines = []
    for hub_id, place in hub_ids(path).items():
        try:
            local_folder(hub_id)
        except CheckpointError as error:
            lines.append(f"{place}: {error}")
    return lines
