"""The composition root: `import_path: app.builder:build` in a Serve config file.

Binds the deployments, each with the config that `app.resolved` derives from the settings. The only module that knows
all of them.
"""

# No postponed annotations here: Serve inspects the type of `build`'s argument at runtime.

import logging
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

from adapters.errors import AdapterError
from adapters.registry import Signature, signatures
from app.access.tenants import ADMIN_KEY_VARIABLE, key_digest
from app.cli import serve_environment
from app.cli.preflight import is_loopback
from app.http.api import create_app
from app.http.hosts import HostRule
from app.own_version import model_version, with_version
from app.resolved import adapter_cache_config, batches_config, gateway_config, key_ring, registry_config
from app.settings import BatchSettings, Settings
from deployments.config import (
    ACCOUNTS,
    BATCHES,
    GATEWAY,
    REGISTRY,
    SAFETY,
    TOKENIZER,
    AccountsConfig,
    ChannelConfig,
    ModelConfig,
    RerankerConfig,
    SafetyConfig,
    cpus_of,
    model_deployment,
    reranker_deployment,
)
from deployments.gateway.gateway import Gateway
from deployments.registry.registry_actor import Registry
from deployments.replica.model_replica import ModelReplica
from deployments.routing.router import SPARE_CALLS
from deployments.tokenizer.tokenizer import ENCODE_TIMEOUT_S, Tokenizer
from engine.errors import ConfigError

_logger = logging.getLogger(__name__)

DRAIN_S = 600.0
"""Maximum time for streams to end before their replica is stopped; an idle replica stops at once."""
_LATE_CALLS_S = 20.0
"""For so long after its stop, calls may still reach a deployment that gateways call; each then has its time limit."""
_SURGE = 100
"""Percentage of extra replicas that rolling updates start before old ones stop, for small deployments only. A device
may have no room for two replicas of a model, so requests wait for the new one."""
_SHUTDOWN_POLL_S = 0.1
_HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0}
"""A replica is replaced after three consecutive failed or unanswered checks: a hung one after about 35 s."""
_LIFE_CYCLE = _HEALTH | {"graceful_shutdown_timeout_s": DRAIN_S, "graceful_shutdown_wait_loop_s": _SHUTDOWN_POLL_S}
_HEAD = "node:__internal_head__"
"""Ray resource that only the head node has."""
_GATEWAY_REQUESTS = 4096
_TOKENIZER_REQUESTS = 256
_CLASSIFIER_REQUESTS = 1024
"""More than gateways admit: the classifier's own queue knows which texts are urgent, its and the cross-encoders' what
can be done in time. Serve's queue knows neither."""


def build(settings: Settings) -> serve.Application:
    """Return the application of a Serve config file, whose `deployments` override every option set here.

    Raises:
        ConfigError: something in the settings cannot be used; the message begins with its path in `args`.
    """
    _refuse_strangers(settings)
    for loss in serve_environment.missing(serve_environment.of_this_process()):
        _logger.warning(loss)
    seen = _seen_folders(settings)
    config = gateway_config(settings)
    told = {"has_accounts": config.accounts is not None, "adapter_cache": adapter_cache_config(settings)}
    models: dict[str, Any] = {model.name: _model(model, config.channel, told) for model in config.models}
    safety = None
    if config.safety is not None and settings.safety is not None and settings.safety.placement == "deployment":
        safety = _safety(config.safety)
    tokenizer = None
    if settings.tokenizer.placement == "deployment":
        tokenizer = _stateless(
            TOKENIZER, Tokenizer, config.models, max_requests=_TOKENIZER_REQUESTS, longest_s=ENCODE_TIMEOUT_S
        )
    rerankers = {reranker.name: _reranker(reranker) for reranker in config.rerankers}
    app = partial(
        create_app,
        limits=settings.limits,
        moderation_model=None if settings.safety is None else settings.safety.name,
        admin_key_sha256=_admin_key(settings),
        key_ring=key_ring(settings, serve_environment.of_this_process()),
        host_rule=HostRule.of(settings.allowed_hosts, is_open=settings.is_open),
        allowed_origins=settings.allowed_origins,
        batch_settings=settings.batches,
        default_timeout_s=settings.default_timeout_s,
    )
    gateway = serve.deployment(serve.ingress()(Gateway)).options(
        name=GATEWAY,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        max_queued_requests=_GATEWAY_REQUESTS,
        ray_actor_options={"num_cpus": cpus_of(GATEWAY)},
        max_surge_percent=_SURGE,
        **_LIFE_CYCLE,
    )
    registry = None
    if settings.registry is not None:
        # It limits its own concurrent work, and answers other calls meanwhile.
        registry = _the_only(REGISTRY, Registry, registry_config(settings, settings.registry, config.models, seen))
    accounts = None if config.accounts is None else _accounts(config.accounts)
    batches = None if settings.batches is None else _batches(settings, settings.batches)
    bound: serve.Application = gateway.bind(
        config, app, models, tokenizer, safety, registry, accounts, batches, rerankers=rerankers
    )
    return bound


def _refuse_strangers(settings: Settings) -> None:
    """Refuse to answer everybody who reaches a server, also where a new configuration lacks the keys of the old one."""
    host = _listen_host()
    if settings.is_open and host is not None and not is_loopback(host):
        raise ConfigError(
            f"args.tenants: anyone who can reach {host}, where Serve listens, could send requests: add API keys, or "
            "set `allow_anonymous: true`"
        )


def _listen_host() -> str | None:
    """Return the address that Serve listens on; None outside of it."""
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    host: str | None = None if client is None else client.http_config.host
    return host


def _admin_key(settings: Settings) -> str | None:
    key = serve_environment.of_this_process().get(ADMIN_KEY_VARIABLE)
    return settings.admin_key_sha256 or (key_digest(key) if key else None)


def _model(model: ModelConfig, channel: ChannelConfig, told: dict[str, Any]) -> serve.Application:
    # Running and queued requests of the engine; each gateway may queue as many again for a replica.
    max_requests = model.engine.max_num_seqs + model.engine.max_queued_requests
    name = model_deployment(model.name)
    deployment = serve.deployment(ModelReplica).options(
        name=name,
        max_ongoing_requests=max_requests + SPARE_CALLS,
        max_queued_requests=max_requests,
        # Ray hides all GPUs from an actor that does not request one.
        ray_actor_options={"num_cpus": cpus_of(name)} | ({"num_gpus": 1} if model.engine.device == "cuda" else {}),
        request_router_config=_request_router(model, channel, max_requests),
        **_LIFE_CYCLE,
    )
    bound: serve.Application = with_version(deployment, model_version(model, channel, told)).bind(
        model, channel, **told
    )
    return bound


def _request_router(model: ModelConfig, channel: ChannelConfig, max_generations: int) -> RequestRouterConfig:
    if channel.transport != "tcp":
        # Replicas report their load over the token channel; without it, Serve's own router knows as much.
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class="deployments.routing.router.FirstTokenRouter",
        request_router_kwargs={"model": model.name, "max_generations": max_generations},
    )


def _safety(config: SafetyConfig) -> serve.Application:
    from deployments.classifiers.safety import Safety

    return _stateless(SAFETY, Safety, config, max_requests=_CLASSIFIER_REQUESTS, longest_s=DRAIN_S)


def _reranker(config: RerankerConfig) -> serve.Application:
    from deployments.classifiers.reranking import Reranker

    name = reranker_deployment(config.name)
    return _stateless(name, Reranker, config, max_requests=_CLASSIFIER_REQUESTS, longest_s=DRAIN_S)


def _stateless(name: str, actor: type, config: object, *, max_requests: int, longest_s: float) -> serve.Application:
    """Bind a stateless deployment that gateways call, for at most `longest_s` each time; idle, it stops at once."""
    return _bound(
        name,
        actor,
        config,
        max_ongoing_requests=max_requests,
        max_queued_requests=_GATEWAY_REQUESTS,
        ray_actor_options={"num_cpus": cpus_of(name)},
        max_surge_percent=_SURGE,
        graceful_shutdown_timeout_s=_LATE_CALLS_S + longest_s,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
    )


def _seen_folders(settings: Settings) -> dict[str, dict[str, Signature]]:
    """Return the signatures of the contents of drop-in folders; taken before reading them, so no change is missed."""
    seen = {}
    for model in settings.models:
        with suppress(AdapterError, OSError):
            seen[model.name] = {} if model.adapter_folder is None else signatures(model.adapter_folder)
    return seen


def _accounts(config: AccountsConfig) -> serve.Application:
    from deployments.accounts.actor import Accounts

    return _the_only(ACCOUNTS, Accounts, config)


def _batches(settings: Settings, batches: BatchSettings) -> serve.Application:
    from deployments.batches.actor import Batches

    return _the_only(BATCHES, Batches, batches_config(settings, batches))


def _the_only(name: str, actor: type, config: object) -> serve.Application:
    """Bind a deployment with a single replica, on the head node, where its files are."""
    return _bound(
        name,
        actor,
        config,
        num_replicas=1,
        max_ongoing_requests=_GATEWAY_REQUESTS,
        # Requests no CPUs, because many head nodes offer none.
        ray_actor_options={"num_cpus": 0, "resources": {_HEAD: 0.001}},
        graceful_shutdown_wait_loop_s=_SHUTDOWN_POLL_S,
    )


def _bound(name: str, actor: type, config: object, **options: Any) -> serve.Application:
    bound: serve.Application = serve.deployment(actor).options(name=name, **options, **_HEALTH).bind(config)
    return bound
