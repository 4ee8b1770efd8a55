"""The composition root: `import_path: app.builder:build` of a Serve config file.

Turns `Settings` once into the frozen values of `deployments.config`, looks at every checkpoint and adapter that they
name, and binds the deployments. The only module that knows them all.
"""

# No postponed annotations here: Serve reads the type of `build`'s argument as it stands.

import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray import serve

from adapters.errors import AdapterError
from adapters.identity import AdapterRef, read_adapter
from adapters.registry import AdapterRegistry, reference, scan
from adapters.validate import validate
from app import serve_environment
from app.admin import ADMIN_KEY_VARIABLE
from app.api import create_app
from app.checkpoint_source import local_folder
from app.fingerprint import model_fingerprint
from app.settings import (
    AccountSettings,
    BatchSettings,
    ModelSettings,
    RegistrySettings,
    SafetySettings,
    Settings,
    TracingSettings,
)
from app.tenants import KeyRing, Tenant, key_digest
from deployments.accounts.values import TenantLimits
from deployments.adapter_registry import GATEWAY, Registry
from deployments.batches.values import MAX_LINE_BYTES
from deployments.config import (
    AccountsConfig,
    AdapterBase,
    BatchesConfig,
    ChannelConfig,
    GatewayConfig,
    ModelConfig,
    RegistryConfig,
    SafetyConfig,
    TracingConfig,
)
from deployments.gateway import Gateway
from deployments.model_replica import ModelReplica
from deployments.tokenizer import Tokenizer
from engine.config import EngineConfig
from engine.decoder.spec import DecoderSpec, read_spec
from engine.errors import CheckpointError, ConfigError

_logger = logging.getLogger(__name__)

DRAIN_S = 600.0
"""A stream may take this long to end before the replica that serves it is stopped; an idle one stops at once."""
_SHUTDOWN_POLL_S = 0.1
_HEALTH_PERIOD_S = 2.0
_GATEWAY_REQUESTS = 4096
_TOKENIZER_REQUESTS = 256
_SAFETY_REQUESTS = 256


def build(settings: Settings) -> serve.Application:
    """Return the application that a Serve config file describes; its `deployments` override every option set here.

    Raises:
        ConfigError: something that the settings name cannot be used; the message begins with its place in `args`.
    """
    for loss in serve_environment.missing(serve_environment.of_this_process()):
        _logger.warning(loss)
    config = gateway_config(settings)
    models: dict[str, Any] = {
        model.name: _model(model, config.channel, has_accounts=config.accounts is not None) for model in config.models
    }
    safety = tokenizer = None
    if config.safety is not None and config.safety_placement == "deployment":
        safety = _safety(config.safety)
    if config.tokenizer_placement == "deployment":
        tokenizer = _tokenizer(config.models)
    app = partial(
        create_app,
        limits=settings.limits,
        moderation_model=None if settings.safety is None else settings.safety.name,
        admin_key_sha256=_admin_key(settings),
        key_ring=key_ring(settings),
        batch_settings=settings.batches,
    )
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name=GATEWAY,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        max_queued_requests=_GATEWAY_REQUESTS,
        ray_actor_options={"num_cpus": 0.2},
        **_life_cycle(),
    )
    registry = None if settings.registry is None else _registry(settings, settings.registry, config.models)
    accounts = None if config.accounts is None else _accounts(config.accounts)
    batches = None if settings.batches is None else _batches(settings, settings.batches)
    bound: serve.Application = gateway.bind(config, app, models, tokenizer, safety, registry, accounts, batches)
    return bound


def registry_config(settings: Settings, registry: RegistrySettings, models: tuple[ModelConfig, ...]) -> RegistryConfig:
    """Return what the registry of adapters is told; its paths are absolute."""
    folder = os.path.abspath(registry.folder)
    allowed = tuple(map(os.path.abspath, registry.allowed_folders))
    return RegistryConfig(
        store_path=os.path.join(folder, "adapters.sqlite"),
        folder=os.path.join(folder, "adapters"),
        bases=tuple(
            AdapterBase(
                name=model.name,
                linear_shapes=read_spec(model.engine.model_path).linear_shapes(),
                max_rank=model.engine.max_adapter_rank,
                watched=None if asked.adapter_folder is None else os.path.abspath(asked.adapter_folder),
                allowed=allowed,
            )
            for asked, model in zip(settings.models, models, strict=True)
        ),
        declared_by_base={model.name: model.adapters for model in models},
        watch_period_s=registry.watch_period_s,
    )


def accounts_config(accounts: AccountSettings) -> AccountsConfig:
    """Return what the accounts are told; paths are absolute."""
    spool = os.path.abspath(accounts.spool_folder)
    return AccountsConfig(
        database_url=accounts.database_url or f"sqlite:///{os.path.join(os.path.dirname(spool), 'accounts.sqlite')}",
        limits_url=accounts.limits_url,
        spool_folder=spool,
    )


def batches_config(settings: Settings, batches: BatchSettings) -> BatchesConfig:
    """Return what the actor that runs batches is told; its folder is absolute."""
    return BatchesConfig(
        folder=os.path.abspath(batches.folder),
        gateway=GATEWAY,
        max_line_bytes=min(settings.limits.max_body_bytes, MAX_LINE_BYTES),
        **batches.model_dump(exclude={"folder", "max_file_bytes"}),
    )


def _tracing(tracing: TracingSettings) -> TracingConfig:
    if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is None:
        raise ConfigError("args.tracing: pip install opentelemetry-exporter-otlp-proto-http")
    return TracingConfig(**tracing.model_dump())


def key_ring(settings: Settings) -> KeyRing:
    """Return whose each key is that the configuration names."""
    tenants = [
        Tenant(
            name=tenant.name,
            models=None if tenant.models is None else frozenset(tenant.models),
            priority=tenant.priority,
            limits=TenantLimits(**tenant.limits.model_dump()),
        )
        for tenant in settings.tenants
    ]
    return KeyRing(
        tenant_by_name={tenant.name: tenant for tenant in tenants},
        name_by_digest={digest: tenant.name for tenant in settings.tenants for digest in tenant.keys_sha256},
    )


def _admin_key(settings: Settings) -> str | None:
    key = serve_environment.of_this_process().get(ADMIN_KEY_VARIABLE)
    return settings.admin_key_sha256 or (key_digest(key) if key else None)


def gateway_config(settings: Settings) -> GatewayConfig:
    """Return what the gateway is told, and through it every other deployment.

    Raises:
        ConfigError: as `build`.
    """
    registry = AdapterRegistry(model.name for model in settings.models)
    return GatewayConfig(
        models=tuple(_model_config(model, f"models[{index}]", registry) for index, model in enumerate(settings.models)),
        channel=ChannelConfig(secret=secrets.token_bytes(32), **settings.channel.model_dump()),
        safety=None if settings.safety is None else _safety_config(settings.safety),
        tokenizer_placement=settings.tokenizer.placement,
        safety_placement="deployment" if settings.safety is None else settings.safety.placement,
        accounts=None if settings.accounts is None else accounts_config(settings.accounts),
        tracing=None if settings.tracing is None else _tracing(settings.tracing),
        max_resumes=settings.max_resumes,
        default_timeout_s=settings.default_timeout_s,
        created_s=int(time.time()),
    )


def _model_config(model: ModelSettings, place: str, registry: AdapterRegistry) -> ModelConfig:
    with _at(f"{place}.path"):
        path = str(local_folder(model.path))
        spec = read_spec(path)
    with _at(f"{place}.tokenizer_path"):
        tokenizer_path = path if model.tokenizer_path is None else str(local_folder(model.tokenizer_path))
    max_model_len = model.engine.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"args.{place}.engine.max_model_len: {max_model_len} is over the checkpoint's {spec.max_position} tokens"
        )
    engine = model.engine
    computation = f"{engine.device} {engine.dtype} {engine.quantization}"
    return ModelConfig(
        name=model.name,
        fingerprint=model_fingerprint(path, computation),
        engine=EngineConfig(model_path=path, tokenizer_path=tokenizer_path, **model.engine.model_dump()),
        tokenizer_path=tokenizer_path,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        tool_format=model.tool_format,
        reasoning_format=model.reasoning_format,
        adapters=tuple(_adapters(model, place, spec, registry)),
    )


def _adapters(model: ModelSettings, place: str, spec: DecoderSpec, registry: AdapterRegistry) -> Iterator[AdapterRef]:
    if model.adapter_folder is not None:
        with _at(f"{place}.adapter_folder"):
            for ref in scan(model.adapter_folder):
                yield _checked(ref, spec, model.engine.max_adapter_rank, registry)
    for index, adapter in enumerate(model.adapters):
        with _at(f"{place}.adapters[{index}]"):
            ref = reference(adapter.name, str(local_folder(adapter.path)))
            yield _checked(ref, spec, model.engine.max_adapter_rank, registry)


def _checked(ref: AdapterRef, spec: DecoderSpec, max_rank: int, registry: AdapterRegistry) -> AdapterRef:
    config, tensors = read_adapter(ref.name, ref.path)
    validate(ref.name, config, tensors.entry_by_name, spec.linear_shapes(), max_rank)
    registry.declare(ref)
    return ref


def _safety_config(safety: SafetySettings) -> SafetyConfig:
    fields = safety.model_dump(exclude={"name", "path", "placement"})
    with _at("safety.path"):
        return SafetyConfig(model_path=str(local_folder(safety.path)), **fields)


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put a place in `args` in front of what is found wrong there."""
    try:
        yield
    except (AdapterError, CheckpointError) as error:
        raise ConfigError(f"args.{place}: {error}") from error


def _model(model: ModelConfig, channel: ChannelConfig, *, has_accounts: bool) -> serve.Application:
    # What runs and what the engine lets wait; as many again may wait for a replica in each gateway.
    max_requests = model.engine.max_num_seqs + model.engine.max_queued_requests
    bound: serve.Application = (
        serve.deployment(ModelReplica)
        .options(
            name=f"Model-{model.name}",
            max_ongoing_requests=max_requests,
            max_queued_requests=max_requests,
            # Ray hides every GPU from an actor that asks for none.
            ray_actor_options={"num_cpus": 0.5} | ({"num_gpus": 1} if model.engine.device == "cuda" else {}),
            **_life_cycle(),
        )
        .bind(model, channel, has_accounts=has_accounts)
    )
    return bound


def _tokenizer(models: tuple[ModelConfig, ...]) -> serve.Application:
    bound: serve.Application = (
        serve.deployment(Tokenizer)
        .options(
            name="Tokenizer",
            max_ongoing_requests=_TOKENIZER_REQUESTS,
            max_queued_requests=_GATEWAY_REQUESTS,
            ray_actor_options={"num_cpus": 0.1},
            health_check_period_s=_HEALTH_PERIOD_S,
        )
        .bind(models)
    )
    return bound


def _safety(config: SafetyConfig) -> serve.Application:
    from deployments.safety import Safety

    bound: serve.Application = (
        serve.deployment(Safety)
        .options(
            name="Safety",
            max_ongoing_requests=_SAFETY_REQUESTS,
            max_queued_requests=_GATEWAY_REQUESTS,
            ray_actor_options={"num_cpus": 0.2},
            health_check_period_s=_HEALTH_PERIOD_S,
        )
        .bind(config)
    )
    return bound


def _registry(settings: Settings, registry: RegistrySettings, models: tuple[ModelConfig, ...]) -> serve.Application:
    return _the_only("Registry", Registry, registry_config(settings, registry, models))


def _accounts(config: AccountsConfig) -> serve.Application:
    from deployments.accounts.actor import Accounts

    return _the_only("Accounts", Accounts, config, max_ongoing_requests=_GATEWAY_REQUESTS)


def _batches(settings: Settings, batches: BatchSettings) -> serve.Application:
    from deployments.batches.actor import Batches

    config = batches_config(settings, batches)
    return _the_only("Batches", Batches, config, max_ongoing_requests=_GATEWAY_REQUESTS)


def _the_only(name: str, actor: type, config: object, **options: Any) -> serve.Application:
    """Bind a deployment of one replica, which decides for all."""
    bound: serve.Application = (
        serve.deployment(actor)
        .options(
            name=name,
            num_replicas=1,
            ray_actor_options={"num_cpus": 0.05},
            health_check_period_s=_HEALTH_PERIOD_S,
            graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
            **options,
        )
        .bind(config)
    )
    return bound


def _life_cycle() -> dict[str, Any]:
    return {
        "health_check_period_s": _HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_POLL_S,
    }
