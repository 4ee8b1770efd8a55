"""The adapters that a configuration declares, each read completely and checked against its base model.

Of those in drop-in folders only what no earlier start has read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from adapters.catalogue import names_taken
from adapters.errors import AdapterError
from adapters.file_store import check_finite
from adapters.identity import AdapterRef
from adapters.registry import (
    DeclaredNames,
    Signature,
    reference,
    reference_in,
    signatures,
    sub_folders,
    tokenizer_signature,
)
from adapters.tokenizer_files import TOKENIZER_FILES
from adapters.validate import validate
from app.checkpoint_source import at, local_folder
from app.known_adapters import KnownAdapters
from app.own_version import own_digest
from app.settings import AdapterSettings, ModelSettings, Settings
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


def declared_names(settings: Settings) -> DeclaredNames:
    """Return the names of a configuration's adapters, of which none is declared yet."""
    bases, cross_encoders = ([part.name for part in parts] for parts in (settings.models, settings.rerankers))
    return DeclaredNames(names_taken(bases, cross_encoders))


def declared_adapters(
    model: ModelSettings,
    place: str,
    spec: ModelSpec,
    names: DeclaredNames,
    allowed: tuple[str, ...],
    on_unfit: OnUnfit,
    known: KnownAdapters,
) -> Iterator[AdapterRef]:
    """Yield references to the adapters of a model: first those in its drop-in folder, then those declared by name.

    Args:
        place: of the model in `args`.
        allowed: further folders that adapters may be loaded from.
        known: what earlier starts have read.

    Raises:
        ConfigError: the drop-in folder does not exist, or `on_unfit` raises it.
    """
    shapes, max_rank = spec.module_shapes(), model.engine.max_adapter_rank
    check = partial(validate, shapes=shapes, max_rank=max_rank)
    tokenizer = str(local_folder(model.tokenizer_path or model.path))
    # Adapters are read completely; a thousand of a large model are a hundred GB.
    readers = ThreadPoolExecutor(NUM_ADAPTER_READERS)
    try:
        if (folder := model.adapter_folder) is not None:
            with at(f"{place}.adapter_folder"):
                found, signed = sub_folders(folder), signatures(folder)
            decides = own_digest(), shapes, max_rank, allowed, _digests_of(tokenizer)
            rules = hashlib.sha256(repr(decides).encode()).digest()
            read_dropped = partial(
                reference_in, folder, allowed=allowed, check=check, examine=check_finite, tokenizer=tokenizer
            )
            if_new = partial(_read_if_new, known, rules, folder, signed, read_dropped)
            for dropped in [readers.submit(if_new, name) for name in found]:
                try:
                    yield names.declare(dropped.result(), model.name)
                except AdapterError as error:
                    on_unfit(f"args.{place}.adapter_folder: {error}", False)

        def read(adapter: AdapterSettings) -> AdapterRef:
            return reference(adapter.name, str(local_folder(adapter.path)), check, check_finite, tokenizer)

        for index, declared in enumerate([readers.submit(read, adapter) for adapter in model.adapters]):
            try:
                with at(f"{place}.adapters[{index}]"):
                    yield names.declare(declared.result(), model.name)
            except ConfigError as error:
                on_unfit(str(error), True)
    finally:
        readers.shutdown(cancel_futures=True)


def _digests_of(tokenizer: str) -> dict[str, str]:
    """Return digests of a base's tokenizer files; their times are new wherever they are unpacked again."""
    paths = (Path(tokenizer, file) for file in TOKENIZER_FILES)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def _read_if_new(
    known: KnownAdapters,
    rules: bytes,
    folder: str,
    signed: Mapping[str, Signature],
    read: Callable[[str], AdapterRef],
    name: str,
) -> AdapterRef:
    if name not in signed:
        return read(name)
    path = os.path.realpath(os.path.join(folder, name))
    return known.reference(partial(read, name), rules, folder, name, path, signed[name], tokenizer_signature(path))
