"""Derive the frozen configs of the deployments from the settings; every checkpoint and adapter is read for that.

A changed configuration is built again while old replicas still serve. Values that both need are made by the first build
and stored on the cluster's head node, where later builds read them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ray.experimental import internal_kv

from adapters.registry import DeclaredNames, Signature
from app.access.tenants import KeyRing, Tenant, key_digest
from app.checkpoint_source import at, local_folder
from app.declared_adapters import OnUnfit, declared_adapters, declared_names, refuse_declared
from app.known_adapters import KnownAdapters
from app.makers_defaults import read_defaults, read_pooling
from app.settings import (
    BatchSettings,
    ModelSettings,
    RegistrySettings,
    Settings,
    SloSettings,
    TracingSettings,
)
from app.settings_access import AccountSettings
from app.settings_classifiers import RerankerSettings, SafetySettings
from deployments.accounts.values import TenantLimits
from deployments.batches.values import MAX_LINE_BYTES
from deployments.classifiers.sequence_window import read_labels, read_window
from deployments.config import (
    AccountsConfig,
    AdapterBase,
    AdapterCacheConfig,
    BatchesConfig,
    ChannelConfig,
    GatewayConfig,
    ModelConfig,
    RegistryConfig,
    RerankerConfig,
    SafetyConfig,
    TracingConfig,
)
from deployments.slo import Slo
from deployments.tokenizer.chat_template import read_template
from engine.config import EngineConfig
from engine.decoder.model_spec import ModelSpec
from engine.errors import ConfigError
from engine.loading.fingerprint import model_fingerprint
from engine.loading.spec import read_checkpoint_spec, read_model_spec
from engine.resolve import check
from engine.speculation.draft_config import resolve_draft

LIBRARY_BY_SCHEME = {"s3": "s3fs", "gs": "gcsfs"}
"""Library that fsspec needs for an object store."""
DEFAULT_QUEUE_S = 30.0
"""A client that has waited this long for the first token has left or retried."""
KNOWN_ADAPTERS = "known_adapters.json"
QUEUE_SHARE = 0.25
"""Default maximum queue time, as a share of the TTFT objective."""
_NAMESPACE = "antiphon"
"""Of what builds remember on the head node."""


def gateway_config(settings: Settings) -> GatewayConfig:
    """Return the config of the gateway, which contains that of most other deployments.

    Raises:
        ConfigError: as `build`.
    """
    names = declared_names(settings)
    # During a rolling update, old gateways and new replicas work together, and the other way round.
    secret = _remembered("channel_secret", partial(secrets.token_bytes, 32))
    registry = settings.registry
    known = KnownAdapters(None if registry is None else Path(os.path.abspath(registry.folder)) / KNOWN_ADAPTERS)
    models = tuple(
        model_config(model, f"models[{index}]", names, settings, known=known)
        for index, model in enumerate(settings.models)
    )
    known.save()
    return GatewayConfig(
        models=models,
        channel=ChannelConfig(secret=secret, **settings.channel.model_dump()),
        local_chars=settings.tokenizer.local_chars,
        safety=None if settings.safety is None else safety_config(settings.safety),
        rerankers=tuple(
            reranker_config(reranker, f"rerankers[{index}]") for index, reranker in enumerate(settings.rerankers)
        ),
        accounts=None if settings.accounts is None else accounts_config(settings.accounts),
        tracing=None if settings.tracing is None else tracing_config(settings.tracing),
        slo=None if settings.slo is None else Slo(**settings.slo.model_dump()),
        max_resumes=settings.max_resumes,
        log_prompts=settings.log_prompts,
        created_s=int(_remembered("created_s", lambda: b"%d" % time.time())),
    )


def _remembered(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the value that the first build in this cluster made for a name; outside a cluster, that of `make`."""
    if not internal_kv._internal_kv_initialized():
        return make()
    # Does nothing if another build was first.
    internal_kv._internal_kv_put(name, make(), overwrite=False, namespace=_NAMESPACE)
    return bytes(internal_kv._internal_kv_get(name, namespace=_NAMESPACE))


def model_config(
    model: ModelSettings,
    place: str,
    names: DeclaredNames,
    settings: Settings,
    on_unfit: OnUnfit = refuse_declared,
    known: KnownAdapters | None = None,
) -> ModelConfig:
    """Return the config of a model, which has this place in `args`, before it is loaded; errors as `gateway_config`."""
    with at(f"{place}.path"):
        path = str(local_folder(model.path))
        spec = read_checkpoint_spec(path)
        pooling = model.pooling or read_pooling(path).value
        sampling = read_defaults(path) if model.sampling_defaults == "model" else {}
    tokenizer_path = _folder(model.tokenizer_path, f"{place}.tokenizer_path") or path
    draft_path = _folder(model.engine.draft_model, f"{place}.engine.draft_model")
    max_model_len = model.engine.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"args.{place}.engine.max_model_len: {max_model_len} is over the checkpoint's {spec.max_position} tokens"
        )
    allowed = () if settings.registry is None else settings.registry.allowed_folders
    engine = EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        max_queue_s=_max_queue_s(model, settings.slo),
        draft_model=draft_path,
        **model.engine.model_dump(exclude={"max_queue_s", "draft_model"}),
    )
    _check_engine(engine, spec, f"{place}.engine")
    computation = f"{engine.device} {engine.dtype} {engine.quantization} {engine.kv_cache_dtype} {sampling}"
    with at(f"{place}.path"):
        fingerprint = model_fingerprint(path, computation)
    return ModelConfig(
        name=model.name,
        fingerprint=fingerprint,
        tokenizer_digest=_file_digest(Path(tokenizer_path) / "tokenizer.json"),
        engine=engine,
        tokenizer_path=tokenizer_path,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        pooling=pooling,
        eos_ids=spec.eos_ids,
        generates=spec.generates,
        sampling=sampling,
        tool_format=model.tool_format,
        reasoning_format=model.reasoning_format,
        chat_template=None if model.chat_template is None else _template(model.chat_template, f"{place}.chat_template"),
        template_by_pattern={
            pattern: _template(path, f"{place}.adapter_chat_templates.{pattern}")
            for pattern, path in model.adapter_chat_templates.items()
        },
        adapters=tuple(declared_adapters(model, place, spec, names, allowed, on_unfit, known or KnownAdapters())),
    )


def _max_queue_s(model: ModelSettings, slo: SloSettings | None) -> float:
    """Return how long a request may wait in the queue: only a share of the TTFT objective.

    Some requests wait longer than the mean, and on an overloaded server a request has already waited before this queue.
    """
    if model.engine.max_queue_s is not None:
        return model.engine.max_queue_s
    return DEFAULT_QUEUE_S if slo is None or slo.ttft_s is None else slo.ttft_s * QUEUE_SHARE


def _folder(path: str | None, place: str) -> str | None:
    with at(place):
        return None if path is None else str(local_folder(path))


def _file_digest(path: Path) -> str:
    """Return the digest of a file, whose absence others report."""
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def _template(path: str, place: str) -> str:
    with at(place):
        return read_template(path)


def _check_engine(engine: EngineConfig, spec: ModelSpec, place: str) -> None:
    draft_spec = None
    if engine.draft_model is not None:
        with at(f"{place}.draft_model"):
            draft_spec = read_checkpoint_spec(engine.draft_model)
    try:
        check(engine, spec)
        if draft_spec is not None:
            resolve_draft(engine, spec, draft_spec, check)
    except ConfigError as error:
        raise ConfigError(f"args.{place}.{error}") from error


def safety_config(safety: SafetySettings) -> SafetyConfig:
    """Return the config of the classifier; errors as `gateway_config`."""
    fields = safety.model_dump(exclude={"name", "path", "placement"})
    with at("safety.path"):
        return SafetyConfig(model_path=str(local_folder(safety.path)), **fields)


def reranker_config(reranker: RerankerSettings, place: str) -> RerankerConfig:
    """Return the config of a cross-encoder, which has this place in `args`; errors as `gateway_config`."""
    fields = reranker.model_dump(exclude={"path", "max_tokens"})
    with at(f"{place}.path"):
        path = str(local_folder(reranker.path))
        window, num_labels = read_window(path), len(read_labels(path))
    if num_labels != 1:
        raise ConfigError(f"args.{place}.path: a cross-encoder has one label, and this one {num_labels}")
    if (reranker.max_tokens or 0) > window:
        raise ConfigError(f"args.{place}.max_tokens: {reranker.max_tokens} is over the checkpoint's {window} tokens")
    return RerankerConfig(model_path=path, max_tokens=reranker.max_tokens or window, **fields)


def tracing_config(tracing: TracingSettings) -> TracingConfig:
    """Return the config of traces; a ConfigError if the library that they require is missing."""
    if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError("args.tracing: pip install opentelemetry-exporter-otlp-proto-http")
    return TracingConfig(**tracing.model_dump())


def accounts_config(accounts: AccountSettings) -> AccountsConfig:
    """Return the config of the accounts; its paths are absolute."""
    spool = os.path.abspath(accounts.spool_folder)
    return AccountsConfig(
        database_url=accounts.database_url or f"sqlite:///{os.path.join(os.path.dirname(spool), 'accounts.sqlite')}",
        limits_url=accounts.limits_url,
        spool_folder=spool,
    )


def registry_config(
    settings: Settings,
    registry: RegistrySettings,
    models: tuple[ModelConfig, ...],
    seen: dict[str, dict[str, Signature]],
) -> RegistryConfig:
    """Return the config of the adapter registry; its paths are absolute.

    Args:
        seen: signatures of the contents of drop-in folders from before the models were read.

    Raises:
        ConfigError: a library that a source requires is missing.
    """
    folder = os.path.abspath(registry.folder)
    check_sources(registry)
    allowed = tuple(map(os.path.abspath, registry.allowed_folders))
    return RegistryConfig(
        store_path=os.path.join(folder, "adapters.sqlite"),
        folder=os.path.join(folder, "adapters"),
        max_versions=registry.max_versions,
        sources=registry.sources,
        max_source_bytes=registry.max_source_bytes,
        source_timeout_s=registry.source_timeout_s,
        bases=tuple(
            AdapterBase(
                name=model.name,
                module_shapes=read_model_spec(model.engine.model_path).module_shapes(),
                max_rank=model.engine.max_adapter_rank,
                watched=None if asked.adapter_folder is None else os.path.abspath(asked.adapter_folder),
                allowed=allowed,
                tokenizer=model.tokenizer_path,
            )
            for asked, model in zip(settings.models, models, strict=True)
        ),
        declared_by_base={model.name: model.adapters for model in models},
        seen_by_base=seen,
        build=secrets.token_hex(8),
        server=_remembered("server", partial(secrets.token_bytes, 8)).hex(),
        cross_encoders=tuple(reranker.name for reranker in settings.rerankers),
        watch_period_s=registry.watch_period_s,
    )


def check_sources(registry: RegistrySettings) -> None:
    """Raise a ConfigError if a library that a source requires is missing."""
    for prefix in registry.sources:
        module = LIBRARY_BY_SCHEME.get(prefix.partition(":")[0])
        if module is not None and importlib.util.find_spec(module) is None:
            raise ConfigError(f"args.registry.sources: '{prefix}' needs `pip install {module}`")


def adapter_cache_config(settings: Settings) -> AdapterCacheConfig | None:
    """Return where model replicas cache the adapter files that they get from the registry."""
    if settings.registry is None:
        return None
    return AdapterCacheConfig(folder=settings.registry.cache_folder, max_bytes=settings.registry.max_cache_bytes)


def batches_config(settings: Settings, batches: BatchSettings) -> BatchesConfig:
    """Return the config of the actor that runs batches; its folder is absolute."""
    return BatchesConfig(
        folder=os.path.abspath(batches.folder),
        max_line_bytes=min(settings.limits.max_body_bytes, MAX_LINE_BYTES),
        **batches.model_dump(exclude={"folder", "max_file_bytes"}),
    )


def key_ring(settings: Settings, environment: Mapping[str, str]) -> KeyRing:
    """Return the tenants and keys of the configuration, and those that it says the environment holds.

    Raises:
        ConfigError: the environment lacks a key, or two tenants have the same.
    """
    tenants = [
        Tenant(
            name=tenant.name,
            models=None if tenant.models is None else frozenset(tenant.models),
            priority=tenant.priority,
            limits=TenantLimits(**tenant.limits.model_dump()),
        )
        for tenant in settings.tenants
    ]
    name_by_digest = {digest: tenant.name for tenant in settings.tenants for digest in tenant.keys_sha256}
    for index, tenant in enumerate(settings.tenants):
        for variable in tenant.key_variables:
            place, key = f"args.tenants[{index}].key_variables", environment.get(variable)
            if not key:
                raise ConfigError(f"{place}: the environment has no {variable}, which should hold a key")
            if name_by_digest.setdefault(key_digest(key), tenant.name) != tenant.name:
                raise ConfigError(f"{place}: {variable} holds a key of another tenant")
    return KeyRing(tenant_by_name={tenant.name: tenant for tenant in tenants}, name_by_digest=name_by_digest)
