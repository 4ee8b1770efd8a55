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
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from adapters.errors import AdapterError
from adapters.identity import AdapterRef, read_adapter
from adapters.registry import AdapterRegistry, reference, scan
from adapters.validate import validate
from app import serve_environment
from app.admin import ADMIN_KEY_VARIABLE
from app.api import create_app
from app.checkpoint_source import local_folder
from app.cluster_memory import remembered
from app.fingerprint import model_fingerprint
from app.hosts import HostRule
from app.settings import (
    AccountSettings,
    BatchSettings,
    ModelSettings,
    RegistrySettings,
    RerankerSettings,
    SafetySettings,
    Settings,
    SloSettings,
    TracingSettings,
)
from app.tenants import KeyRing, Tenant, key_digest
from deployments.accounts.values import TenantLimits
from deployments.adapter_registry import GATEWAY, Registry
from deployments.config import (
    AccountsConfig,
    AdapterBase,
    BatchesConfig,
    ChannelConfig,
    GatewayConfig,
    ModelConfig,
    RegistryConfig,
    RerankerConfig,
    SafetyConfig,
    TracingConfig,
)
from deployments.gateway import Gateway
from deployments.model_replica import ModelReplica
from deployments.sequence_window import read_window
from deployments.slo import Slo
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
_RERANKER_REQUESTS = 64


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
    rerankers = {reranker.name: _reranker(reranker) for reranker in config.rerankers}
    app = partial(
        create_app,
        limits=settings.limits,
        moderation_model=None if settings.safety is None else settings.safety.name,
        admin_key_sha256=_admin_key(settings),
        key_ring=key_ring(settings),
        host_rule=HostRule.of(settings.allowed_hosts, is_open=not settings.tenants and not settings.allow_anonymous),
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
    bound: serve.Application = gateway.bind(
        config, app, models, tokenizer, safety, registry, accounts, batches, rerankers=rerankers
    )
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
                module_shapes=read_spec(model.engine.model_path).module_shapes(),
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
        # A line is a request and its name; over the bound of a body the gateway refuses it by itself.
        max_line_bytes=2 * settings.limits.max_body_bytes,
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
    # Old gateways and new replicas, or the other way round, work together while a changed configuration is rolled out.
    secret = remembered("channel_secret", partial(secrets.token_bytes, 32))
    return GatewayConfig(
        models=tuple(
            _within_slo(settings.slo, _model_config(model, f"models[{index}]", registry))
            for index, model in enumerate(settings.models)
        ),
        channel=ChannelConfig(secret=secret, **settings.channel.model_dump()),
        safety=None if settings.safety is None else _safety_config(settings.safety),
        rerankers=tuple(
            _reranker_config(reranker, f"rerankers[{index}]") for index, reranker in enumerate(settings.rerankers)
        ),
        tokenizer_placement=settings.tokenizer.placement,
        safety_placement="deployment" if settings.safety is None else settings.safety.placement,
        accounts=None if settings.accounts is None else accounts_config(settings.accounts),
        tracing=None if settings.tracing is None else _tracing(settings.tracing),
        slo=None if settings.slo is None else Slo(**settings.slo.model_dump()),
        max_resumes=settings.max_resumes,
        default_timeout_s=settings.default_timeout_s,
        created_s=int(remembered("created_s", lambda: b"%d" % time.time())),
    )


def _within_slo(slo: SloSettings | None, model: ModelConfig) -> ModelConfig:
    """Bound the wait where only the objective does; half of it is left for who waits longer than the mean."""
    if slo is None or slo.ttft_s is None or model.engine.max_queue_s is not None:
        return model
    return replace(model, engine=replace(model.engine, max_queue_s=slo.ttft_s / 2))


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
    computation = f"{engine.device} {engine.dtype} {engine.quantization} {engine.kv_cache_dtype}"
    return ModelConfig(
        name=model.name,
        fingerprint=model_fingerprint(path, computation),
        engine=EngineConfig(model_path=path, tokenizer_path=tokenizer_path, **model.engine.model_dump()),
        tokenizer_path=tokenizer_path,
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        pooling=model.pooling,
        eos_ids=spec.eos_ids,
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
    validate(ref.name, config, tensors.entry_by_name, spec.module_shapes(), max_rank)
    registry.declare(ref)
    return ref


def _safety_config(safety: SafetySettings) -> SafetyConfig:
    fields = safety.model_dump(exclude={"name", "path", "placement"})
    with _at("safety.path"):
        return SafetyConfig(model_path=str(local_folder(safety.path)), **fields)


def _reranker_config(reranker: RerankerSettings, place: str) -> RerankerConfig:
    fields = reranker.model_dump(exclude={"path", "max_tokens"})
    with _at(f"{place}.path"):
        path = str(local_folder(reranker.path))
        window = read_window(path)
    if (reranker.max_tokens or 0) > window:
        raise ConfigError(f"args.{place}.max_tokens: {reranker.max_tokens} is over the checkpoint's {window} tokens")
    return RerankerConfig(model_path=path, max_tokens=reranker.max_tokens or window, **fields)


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
            request_router_config=_request_router(model, channel),
            **_life_cycle(),
        )
        .bind(model, channel, has_accounts=has_accounts)
    )
    return bound


def _request_router(model: ModelConfig, channel: ChannelConfig) -> RequestRouterConfig:
    if channel.transport != "tcp":
        # What replicas report comes by the token channel; without it Serve's own choice knows as much.
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="deployments.routing.router.FirstTokenRouter", request_router_kwargs={"model": model.name}
    )


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


def _reranker(config: RerankerConfig) -> serve.Application:
    from deployments.reranking import Reranker

    bound: serve.Application = (
        serve.deployment(Reranker)
        .options(
            name=f"Reranker-{config.name}",
            max_ongoing_requests=_RERANKER_REQUESTS,
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
