"""Check valid settings by what they name, without starting anything: what the server would refuse, one line each.

A tokenizer may import transformers without torch, and then no model or classifier of this process can be computed by
transformers any more. Tokenizers are therefore checked after all other parts of all applications.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from adapters.registry import DeclaredNames
from app.checkpoint_source import at, is_hub_id, local_folder
from app.declared_adapters import declared_names
from app.resolved import accounts_config, check_sources, model_config, reranker_config, safety_config, tracing_config
from app.settings import ModelSettings, Settings
from app.settings_access import AccountSettings
from app.settings_classifiers import RerankerSettings, SafetySettings
from deployments.classifiers.sequence_window import check_head, check_labels, check_problem, read_labels, read_window
from deployments.tokenizer.text_codec import TextCodec
from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError, ConfigError
from engine.loading.contents import check_contents
from engine.loading.spec import read_checkpoint_spec


def mistakes(settings: Settings, *, reads_all: bool, notes: list[str] | None = None) -> list[str]:
    """Return what `gateway_config` and `registry_config` would refuse, based on local files.

    There is one mistake per part and per adapter. Parts that would have to be downloaded from a hub are skipped, and
    tokenizers are left to `tokenizer_mistakes`.

    Args:
        reads_all: also read all declared adapters completely, as when the server starts.
        notes: gets a line for each adapter in a drop-in folder that is not served; the server starts without it.
    """
    names = declared_names(settings)
    found: list[str] = []
    notes = [] if notes is None else notes
    for index, model in enumerate(settings.models):
        if not reads_all:
            model = model.model_copy(update={"adapters": (), "adapter_folder": None})
        if not any(map(is_hub_id, model.sources().values())):
            with _noted(found):
                _check_model(model, f"models[{index}]", names, settings, found, notes)
    if settings.safety is not None and not is_hub_id(settings.safety.path):
        with _noted(found):
            _check_safety(settings.safety)
    for index, reranker in enumerate(settings.rerankers):
        if not is_hub_id(reranker.path):
            with _noted(found):
                _check_reranker(reranker, f"rerankers[{index}]")
    if settings.accounts is not None:
        with _noted(found):
            _check_accounts(settings.accounts)
    if settings.tracing is not None:
        with _noted(found):
            tracing_config(settings.tracing)
    if settings.registry is not None:
        with _noted(found):
            check_sources(settings.registry)
    return found


def tokenizer_mistakes(settings: Settings) -> list[str]:
    """Return what is wrong with the tokenizers of parts that need not be downloaded, at most one mistake per part."""
    found: list[str] = []
    for index, model in enumerate(settings.models):
        if not any(map(is_hub_id, model.sources().values())):
            with _noted(found):
                _check_tokenizer(model, f"models[{index}]")
    classifiers = {f"rerankers[{index}].path": reranker.path for index, reranker in enumerate(settings.rerankers)}
    if settings.safety is not None:
        classifiers["safety.path"] = settings.safety.path
    for place, path in classifiers.items():
        if not is_hub_id(path):
            with _noted(found), at(place):
                load_tokenizer(str(local_folder(path)))
    return found


@contextmanager
def _noted(found: list[str]) -> Iterator[None]:
    """Add what the block refuses to what is found."""
    try:
        yield
    except ConfigError as error:
        found.append(str(error))


def _check_model(
    model: ModelSettings, place: str, names: DeclaredNames, settings: Settings, found: list[str], notes: list[str]
) -> None:
    def note_unfit(mistake: str, is_declared: bool) -> None:
        (found if is_declared else notes).append(mistake)

    model_config(model, place, names, settings, on_unfit=note_unfit)
    for part, folder in (("path", model.path), ("engine.draft_model", model.engine.draft_model)):
        if folder is not None:
            with at(f"{place}.{part}"):
                path = str(local_folder(folder))
                check_contents(path, read_checkpoint_spec(path))


def _check_safety(safety: SafetySettings) -> None:
    config = safety_config(safety)
    with at("safety.path"):
        read_window(config.model_path)
        check_head(config.model_path)
        check_problem(config.model_path)
        labels = read_labels(config.model_path)
    check_labels(config, labels)


def _check_reranker(reranker: RerankerSettings, place: str) -> None:
    path = reranker_config(reranker, place).model_path
    with at(f"{place}.path"):
        check_head(path)


def _check_accounts(accounts: AccountSettings) -> None:
    # Imported here: a builder, which does not connect to databases, needs no library for them.
    from deployments.accounts.urls import check_urls

    check_urls(accounts_config(accounts))


def _check_tokenizer(model: ModelSettings, place: str) -> None:
    with at(f"{place}.{'path' if model.tokenizer_path is None else 'tokenizer_path'}"):
        TextCodec(str(local_folder(model.tokenizer_path or model.path)))
        if model.tokenizer_path is not None:
            _check_ids(str(local_folder(model.tokenizer_path)), str(local_folder(model.path)))


def _check_ids(tokenizer_path: str, model_path: str) -> None:
    """Refuse a tokenizer of another model, with ids that this model lacks: prompts that contain one fail.

    Some models' own tokenizers have a few more added tokens than their vocabulary, such as those for images in Gemma's
    models for text alone. So many are accepted here, too, and any number if the model comes without a tokenizer.

    Raises:
        CheckpointError: it has such ids.
    """
    try:
        vocab_size = read_checkpoint_spec(model_path).vocab_size
    except (CheckpointError, OSError):
        # Reported where the model is checked.
        return
    largest_id = _largest_id(tokenizer_path)
    if largest_id < vocab_size:
        return
    try:
        allowed_id = max(vocab_size - 1, _largest_id(model_path))
    except (CheckpointError, OSError):
        allowed_id, largest_id = vocab_size - 1, _largest_id(tokenizer_path, with_added=False)
    if largest_id > allowed_id:
        raise CheckpointError(
            f"{tokenizer_path}: token ids up to {largest_id} do not fit a model of {vocab_size} tokens"
        )


def _largest_id(folder: str, *, with_added: bool = True) -> int:
    return max(load_tokenizer(folder).backend.get_vocab(with_added_tokens=with_added).values(), default=0)
