"""The adapters that a configuration declares, each read completely and checked against its base model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from adapters.errors import AdapterError
from adapters.file_store import check_finite
from adapters.identity import AdapterRef
from adapters.registry import DeclaredNames, reference, reference_in, sub_folders
from adapters.validate import validate
from app.checkpoint_source import at, local_folder
from app.settings import AdapterSettings, ModelSettings
from engine.decoder.model_spec import ModelSpec
from engine.errors import ConfigError

_logger = logging.getLogger(__name__)

NUM_ADAPTER_READERS = 4
"""Threads that read adapters; each holds a whole adapter in memory."""
OnUnfit = Callable[[str, bool], None]
"""Called for each adapter that cannot be served, with the reason and whether the configuration declares it by name."""


def refuse_declared(mistake: str, is_declared: bool) -> None:
    """Refuse to start with a declared adapter that cannot be served; files of a drop-in folder come and go."""
    if is_declared:
        raise ConfigError(mistake)
    _logger.warning(mistake)


def declared_adapters(
    model: ModelSettings,
    place: str,
    spec: ModelSpec,
    names: DeclaredNames,
    allowed: tuple[str, ...],
    on_unfit: OnUnfit,
) -> Iterator[AdapterRef]:
    """Yield references to the adapters of a model: first those in its drop-in folder, then those declared by name.

    Args:
        place: of the model in `args`.
        allowed: further folders that adapters may be loaded from.

    Raises:
        ConfigError: the drop-in folder does not exist, or `on_unfit` raises it.
    """
    check = partial(validate, shapes=spec.module_shapes(), max_rank=model.engine.max_adapter_rank)
    # Adapters are read completely; a thousand of a large model are a hundred GB.
    readers = ThreadPoolExecutor(NUM_ADAPTER_READERS)
    try:
        if (folder := model.adapter_folder) is not None:
            with at(f"{place}.adapter_folder"):
                found = sub_folders(folder)
            for dropped in [readers.submit(reference_in, folder, name, allowed, check, check_finite) for name in found]:
                try:
                    yield names.declare(dropped.result(), model.name)
                except AdapterError as error:
                    on_unfit(f"args.{place}.adapter_folder: {error}", False)

        def read(adapter: AdapterSettings) -> AdapterRef:
            return reference(adapter.name, str(local_folder(adapter.path)), check, check_finite)

        for index, declared in enumerate([readers.submit(read, adapter) for adapter in model.adapters]):
            try:
                with at(f"{place}.adapters[{index}]"):
                    yield names.declare(declared.result(), model.name)
            except ConfigError as error:
                on_unfit(str(error), True)
    finally:
        readers.shutdown(cancel_futures=True)
