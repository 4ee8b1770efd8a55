"""Configuration passed to each deployment at construction: frozen values that `app.resolved` derives from the settings.

Pure. Nothing below `app` sees pydantic, YAML or the environment. Fields named like a setting are documented there
(`app.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from adapters.identity import AdapterRef
from adapters.registry import Signature
from adapters.validate import ModuleShapes
from deployments.slo import Slo
from engine.config import EngineConfig

GATEWAY, TOKENIZER, SAFETY = "Gateway", "Tokenizer", "Safety"
"""Names of the ingress deployment, and of those that gateways share."""
REGISTRY, ACCOUNTS, BATCHES = "Registry", "Accounts", "Batches"
"""Names of the deployments of one replica: all adapters, all usage, and all files and batches."""
_CPUS_BY_PART = {GATEWAY: 0.2, "Model": 0.5, "Reranker": 0.2, SAFETY: 0.2, TOKENIZER: 0.1}
"""By the name of a deployment up to a hyphen."""


def model_deployment(model: str) -> str:
    """Return the name of the deployment of a base model's replicas."""
    return f"Model-{model}"


def reranker_deployment(reranker: str) -> str:
    """Return the name of the deployment of a cross-encoder."""
    return f"Reranker-{reranker}"


def cpus_of(deployment: str) -> float:
    """Return the CPUs that a replica of a deployment requests from Ray unless configured."""
    return _CPUS_BY_PART.get(deployment.partition("-")[0], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One base model and its declared adapters.

    Attributes:
        name: public name; also names its Serve deployment (`Model-<name>`).
        tokenizer_path: folder with tokenizer.json and the chat template; usually the model's own.
        max_model_len: resolved context length in tokens, known before any replica is up.
        fingerprint: digest of the weights and of the settings that affect the computation.
        tokenizer_digest: of tokenizer.json; the same token ids mean the same text.
        hidden_size: dimensions of a vector of `/v1/embeddings`.
        pooling: "last" or "mean"; the default for embedding requests.
        eos_ids: token ids that end an answer.
        generates: whether it generates text; otherwise it only computes embeddings.
        sampling: default parameters of `engine.request.SamplingParams` for those that a request leaves open.
        tool_format, reasoning_format: name of a format, "none", or None to detect it in the chat template.
        chat_template: its text, in place of that in `tokenizer_path`.
        template_by_pattern: chat templates of adapters whose name a pattern matches; the first match applies.
    """

    name: str
    engine: EngineConfig
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    pooling: str = "last"
    fingerprint: str = ""
    tokenizer_digest: str = ""
    eos_ids: tuple[int, ...] = ()
    generates: bool = True
    sampling: dict[str, float] = field(default_factory=dict)
    tool_format: str | None = None
    reasoning_format: str | None = None
    chat_template: str | None = None
    template_by_pattern: dict[str, str] = field(default_factory=dict)
    adapters: tuple[AdapterRef, ...] = ()

    def template_by_codec(self) -> dict[str, str | None]:
        """Return the chat template of each of its codecs by the codec's name; None for the tokenizer's own."""
        templates = {self._codec(pattern): text for pattern, text in self.template_by_pattern.items()}
        return {self.name: self.chat_template, **templates}

    def codec_of(self, adapter: str | None) -> str:
        """Return the name of the codec for an adapter's name, or for the base model."""
        if adapter is None:
            return self.name
        matching = (pattern for pattern in self.template_by_pattern if fnmatchcase(adapter, pattern))
        return next(map(self._codec, matching), self.name)

    def _codec(self, pattern: str) -> str:
        # No public name has a space.
        return f"{self.name} {pattern}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """How tokens travel from a model replica to a gateway.

    Attributes:
        secret: shared by both ends of a connection; drawn once per cluster lifetime.
        stream_spacing_s: see `deployments.channel.outbox.Outbox`.
    """

    secret: bytes = field(repr=False)
    transport: str = "tcp"
    host: str | None = None
    max_buffered_bytes: int = 1 << 20
    stream_spacing_s: float = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyConfig:
    """The safety classifier in the folder `model_path`, and the policy for its verdicts.

    Attributes:
        max_tokens: of one window of a text, if the checkpoint's are not shorter.
    """

    model_path: str
    mode: str = "before"
    threshold: float = 0.5
    threshold_by_hazard: dict[str, float] = field(default_factory=dict)
    screen_input: bool = True
    screen_output: bool = True
    screen_embeddings: bool = False
    window_chars: int = 200
    overlap_chars: int = 50
    fails_closed: bool = True
    timeout_s: float = 5.0
    max_batch: int = 32
    max_tokens: int = 512
    max_chars: int = 100_000
    benign_labels: tuple[str, ...] = ()
    num_threads: int = 1
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerConfig:
    """One cross-encoder in the folder `model_path`; `max_tokens` does not exceed its window."""

    name: str
    model_path: str
    max_tokens: int
    max_batch: int = 32
    max_chars: int = 100_000
    timeout_s: float = 30.0
    num_threads: int = 1
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBase:
    """The properties of a base model that an adapter must fit.

    Attributes:
        watched: the drop-in folder, or None.
        allowed: further folders that adapters may be registered from.
        tokenizer: folder of its tokenizer; None: those of adapters are not compared with it.
    """

    name: str
    module_shapes: ModuleShapes
    max_rank: int
    watched: str | None = None
    allowed: tuple[str, ...] = ()
    tokenizer: str | None = None

    @property
    def roots(self) -> tuple[str, ...]:
        """All folders that adapters may be registered from."""
        return self.allowed if self.watched is None else (self.watched, *self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Where the names of adapters are stored, and where adapters may come from.

    Attributes:
        store_path: SQLite file.
        folder: files of registered adapters are copied into it, by digest.
        max_versions: bound per name, apart from as many on trial; the oldest without traffic make room for new ones.
        bases: the base models of adapters.
        declared_by_base: adapters that the configuration names.
        seen_by_base: signatures of each drop-in folder's contents, taken before it was read for `declared_by_base`.
        build: identifies the build of the application.
        server: identifies the cluster, whatever it has built.
        cross_encoders: names of cross-encoders, which no adapter may have.
    """

    store_path: str
    folder: str
    max_versions: int = 64
    sources: tuple[str, ...] = ()
    max_source_bytes: int = 2 << 30
    source_timeout_s: float = 300.0
    bases: tuple[AdapterBase, ...] = ()
    declared_by_base: dict[str, tuple[AdapterRef, ...]] = field(default_factory=dict)
    seen_by_base: dict[str, dict[str, Signature]] = field(default_factory=dict)
    build: str = ""
    server: str = ""
    cross_encoders: tuple[str, ...] = ()
    watch_period_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCacheConfig:
    """Where a node that does not share the registry's folder caches adapter files, and the bound in bytes."""

    folder: str
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountsConfig:
    """Where the usage and limits of tenants are stored."""

    database_url: str
    spool_folder: str
    limits_url: str = "memory://"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesConfig:
    """Clients' files, and the batches of requests run from them.

    Attributes:
        max_tenant_bytes: bound on all files of a tenant together, with what its unfinished batches have written.
        max_unfinished: bound on a tenant's unfinished batches.
        max_line_bytes: bound on a line of an input file.
        responses_last_s: how long responses are kept for those that continue them; None to keep none.
        max_response_bytes: bound on all responses of a tenant; the oldest are dropped.
    """

    folder: str
    max_tenant_bytes: int
    responses_last_s: int | None
    max_response_bytes: int
    max_unfinished: int
    max_lines: int
    max_line_bytes: int
    max_concurrent_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where traces are exported to, by OTLP over HTTP."""

    endpoint: str
    sample_ratio: float
    service: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Configuration of the gateway.

    Attributes:
        local_chars: prompts that count more characters are tokenized by the tokenizer deployment, if there is one.
        created_s: Unix time at which the model names were declared.
    """

    models: tuple[ModelConfig, ...]
    channel: ChannelConfig
    local_chars: int = 0
    safety: SafetyConfig | None = None
    rerankers: tuple[RerankerConfig, ...] = ()
    accounts: AccountsConfig | None = None
    tracing: TracingConfig | None = None
    slo: Slo | None = None
    max_resumes: int = 3
    log_prompts: bool = False
    created_s: int = 0
