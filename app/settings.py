"""The `args` of our application in a Serve config file: one frozen tree, every default and its unit.

Unknown keys are refused. `app.resolved` turns a `Settings` once into the dataclasses of `deployments.config`; nobody
below `app` sees it. Paths are relative to the folder that `serve run` was started in.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from app.settings_access import AccountSettings, HostName, KeyDigest, Origin, TenantLimitSettings, TenantSettings
from app.settings_engine import EngineSettings
from app.settings_node import FolderPath, PublicName, SettingsNode

ToolFormatName = Literal[
    "hermes", "llama3", "mistral", "mistral_args", "nemotron", "functionary", "qwen3_coder", "xlam", "json", "none"
]  # fmt: skip


class AdapterSettings(SettingsNode):
    """One LoRA adapter and the name that clients ask it by."""

    name: PublicName = Field(description="Public model name of the adapter.")
    path: FolderPath = Field(description="Folder in PEFT layout, or a Hugging Face hub id.")


class ModelSettings(SettingsNode):
    """One base model with its adapters; it becomes the Serve deployment `Model-<name>`."""

    name: PublicName = Field(description="Public model name.")
    path: FolderPath = Field(description="Folder in Hugging Face layout with safetensors, or a hub id (`org/name`).")
    tokenizer_path: FolderPath | None = Field(
        default=None, description="Folder of the tokenizer; null: the model's own."
    )
    adapters: tuple[AdapterSettings, ...] = Field(default=(), description="Adapters declared one by one.")
    adapter_folder: FolderPath | None = Field(
        default=None, description="Folder whose subfolders are adapters of this model, named by the subfolder."
    )
    tool_format: ToolFormatName | None = Field(
        default=None, description="How this model writes calls of tools; null: as its chat template shows."
    )
    reasoning_format: Literal["think", "mistral", "none"] | None = Field(
        default=None, description="How this model marks its thoughts; null: as its chat template shows."
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="How tokens are drawn where a request does not say: as the checkpoint's generation_config.json "
        "does, or plainly.",
    )
    pooling: Literal["last", "mean"] | None = Field(
        default=None,
        description="What vectors are made of where a request does not say: the last token, or all; null: as the "
        "checkpoint's modules.json says, else the last.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="How the engine runs.")


class SafetySettings(SettingsNode):
    """The safety classifier; the fields are those of `deployments.config.SafetyConfig`."""

    name: PublicName = Field(default="guard", description="Name under which `/v1/moderations` shows the classifier.")
    path: FolderPath = Field(description="Folder of an AutoModelForSequenceClassification checkpoint, or a hub id.")
    placement: Literal["deployment", "inline"] = Field(
        default="deployment",
        description="Own replicas, or inside the gateway's process (saves a hop of about a millisecond).",
    )
    mode: Literal["before", "alongside"] = Field(
        default="before",
        description="Judge the input before any engine work, or beside prefill with the first byte held back.",
    )
    threshold: float = Field(default=0.5, ge=0, le=1, description="Probability at which a hazard counts as found.")
    threshold_by_hazard: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="Exceptions to `threshold`, by the classifier's label."
    )
    screen_input: bool = Field(default=True, description="Whether prompts are judged.")
    screen_output: bool = Field(default=True, description="Whether answers are judged, window by window.")
    screen_embeddings: bool = Field(
        default=False, description="Whether inputs of vectors are judged; one that is flagged refuses its request."
    )
    window_chars: int = Field(
        default=200, ge=1, description="Characters in a window of the answer; held back until judged."
    )
    overlap_chars: int = Field(default=50, ge=0, description="Characters that neighbouring windows share.")
    fails_closed: bool = Field(
        default=True, description="Whether requests are refused while the classifier cannot be reached."
    )
    timeout_s: float = Field(default=5.0, gt=0, description="Seconds to wait for a verdict.")
    max_batch: int = Field(default=32, ge=1, description="Texts in one forward pass.")
    batch_wait_s: float = Field(default=0.002, ge=0, description="Seconds that a text waits for company.")
    max_chars: int = Field(default=100_000, ge=1, description="Characters of one text that are judged at most.")
    benign_labels: tuple[str, ...] = Field(
        default=(), description="Labels of the classifier that mean nothing was found."
    )
    num_threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the classifier.")

    @model_validator(mode="after")
    def _windows_advance(self) -> Self:
        if self.overlap_chars >= self.window_chars:
            raise ValueError(
                f"overlap_chars ({self.overlap_chars}) must be smaller than window_chars ({self.window_chars})"
            )
        return self


class RerankerSettings(SettingsNode):
    """One cross-encoder for `/v1/score` and `/v1/rerank`; it becomes the Serve deployment `Reranker-<name>`."""

    name: PublicName = Field(description="Public model name.")
    path: FolderPath = Field(
        description="Folder of an AutoModelForSequenceClassification checkpoint with one label, or a hub id."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a query and a document together; null: what the checkpoint reads."
    )
    max_batch: int = Field(default=32, ge=1, description="Pairs in one forward pass.")
    batch_wait_s: float = Field(default=0.002, ge=0, description="Seconds that a pair waits for company.")
    max_chars: int = Field(default=100_000, ge=1, description="Characters of a query, and of a document.")
    timeout_s: float = Field(default=30.0, gt=0, description="Seconds that a request for scores may take.")
    num_threads: int = Field(default=1, ge=1, le=1024, description="CPU threads of the model.")


class ChannelSettings(SettingsNode):
    """How tokens travel from model replicas to gateways."""

    transport: Literal["tcp", "handle"] = Field(
        default="tcp",
        description="One connection for each replica and gateway, or Serve's streaming handles (closed networks).",
    )
    host: str | None = Field(default=None, description="Address on which gateways listen; null: the node's own.")
    max_buffered_bytes: int = Field(
        default=1 << 20, ge=1024, description="Unread bytes at which a slow reader's stream ends."
    )
    stream_spacing_s: float = Field(
        default=0.0005,
        ge=0,
        le=0.05,
        description="Seconds that a stream's next tokens wait for each stream that gets some with them, 0.05 at most; "
        "an answer's first and last ones wait for nothing. 0: tokens leave with their step.",
    )


class TokenizerSettings(SettingsNode):
    """Where text becomes token ids."""

    placement: Literal["deployment", "inline"] = Field(
        default="deployment",
        description="Own replicas, or inside the gateway's process (saves a hop of about a millisecond).",
    )


SourcePrefix = Annotated[str, StringConstraints(pattern=r"^(?:hf://|(?:s3|gs|https?)://[^/@\s]+/)(?:[^/\s]+/)*$")]
"""The beginning of URLs; with the slash at its end, `s3://bucket/` is no beginning of `s3://bucket2/`."""


class RegistrySettings(SettingsNode):
    """Adapters that come and go while the server runs; their routes need the admin key."""

    folder: FolderPath = Field(
        default=".antiphon", description="Folder that keeps their names and files; it outlives the server."
    )
    allowed_folders: tuple[FolderPath, ...] = Field(
        default=(), description="Folders that adapters may be loaded from, besides each model's `adapter_folder`."
    )
    sources: tuple[SourcePrefix, ...] = Field(
        default=(),
        description="Beginnings of URLs that adapters may be fetched from, each with a slash at its end: "
        "hf://org/, s3://bucket/folder/, gs://bucket/, https://host/folder/.",
    )
    max_versions: int = Field(
        default=64, ge=2, description="Versions of one name; the oldest without traffic make room for a new one."
    )
    max_source_bytes: int = Field(default=2 << 30, ge=1, description="Bytes of one adapter that is fetched.")
    source_timeout_s: float = Field(default=300.0, gt=0, description="Seconds that fetching an adapter may take.")
    cache_folder: FolderPath = Field(
        default="~/.cache/antiphon/adapters",
        description="Folder on each node for adapters whose files it does not have: it does not share `folder`.",
    )
    max_cache_bytes: int = Field(
        default=16 << 30, ge=1, description="Bytes of `cache_folder`, or of what the last minute needed of it."
    )
    watch_period_s: float = Field(
        default=2.0, gt=0, description="Seconds between two looks at each model's `adapter_folder`."
    )


class BatchSettings(SettingsNode):
    """Files and batches; the actor `Batches` has them and runs them behind all other requests."""

    folder: FolderPath = Field(
        default=".antiphon/batches", description="Folder that keeps them; it outlives the server, and is for one alone."
    )
    max_file_bytes: int = Field(default=200_000_000, ge=1, description="Bytes of one uploaded file.")
    max_tenant_bytes: int = Field(default=10_000_000_000, ge=1, description="Bytes of all files of a tenant together.")
    max_lines: int = Field(default=50_000, ge=1, description="Requests in one batch.")
    max_unfinished: int = Field(default=8, ge=1, description="Batches of a tenant at once.")
    max_concurrent_requests: int = Field(
        default=8, ge=1, description="Requests of all batches together that are under way at once."
    )


class TracingSettings(SettingsNode):
    """Traces for OpenTelemetry; needs `pip install opentelemetry-exporter-otlp-proto-http`."""

    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://")] = Field(
        description="Of a collector, OTLP over HTTP: http://host:4318/v1/traces."
    )
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of answers that are traced, where the client has not decided."
    )
    service: str = Field(default="antiphon", min_length=1, description="Name under which traces are found.")


class SloSettings(SettingsNode):
    """What a user should see at worst, from arrival; answers inside all of it are the goodput that is measured."""

    ttft_s: float | None = Field(default=None, gt=0, description="Seconds to the first token.")
    tpot_s: float | None = Field(default=None, gt=0, description="Mean seconds between tokens after the first.")
    e2e_s: float | None = Field(default=None, gt=0, description="Seconds to the end of the answer.")


class LimitSettings(SettingsNode):
    """Bounds on one HTTP request; over any of them it is refused with a 4xx that names the field."""

    max_body_bytes: int = Field(default=4_000_000, ge=1024, description="Bytes of a request body.")
    max_messages: int = Field(default=2048, ge=1, description="Messages in one chat.")
    max_prompt_chars: int = Field(default=2_000_000, ge=1, description="Characters of all messages or prompts.")
    max_prompts: int = Field(
        default=64, ge=1, description="Prompts in one completions request, texts in one moderation."
    )
    max_embedding_inputs: int = Field(default=2048, ge=1, description="Inputs of one request for vectors.")
    max_documents: int = Field(default=1000, ge=1, description="Pairs of one request for scores.")
    max_choices: int = Field(default=128, ge=1, description="Answers that one request makes, all prompts together.")
    max_schema_chars: int = Field(default=65536, ge=1, description="Characters of a schema, regex or grammar.")
    max_schema_depth: int = Field(default=64, ge=1, description="Objects and arrays in one another, in a schema.")
    max_tools: int = Field(default=128, ge=0, description="Tools of one chat.")
    max_tools_chars: int = Field(default=262_144, ge=1, description="Characters of all tools' schemas together.")
    max_logit_bias: int = Field(default=1024, ge=0, description="Entries of `logit_bias`.")
    max_stop_strings: int = Field(default=16, ge=0, description="Stop strings of one request.")
    max_stop_chars: int = Field(default=256, ge=1, description="Characters in one stop string.")


class Settings(SettingsNode):
    """Everything that a person sets under `applications[*].args`."""

    models: tuple[ModelSettings, ...] = Field(description="Base models, each with its adapters.")
    safety: SafetySettings | None = Field(default=None, description="The safety classifier; null: nothing is screened.")
    rerankers: tuple[RerankerSettings, ...] = Field(default=(), description="Cross-encoders that score documents.")
    channel: ChannelSettings = Field(default_factory=ChannelSettings, description="The token channel.")
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings, description="The tokenizer.")
    registry: RegistrySettings | None = Field(
        default_factory=RegistrySettings, description="Adapters that come and go; null: those of the start only."
    )
    tenants: tuple[TenantSettings, ...] = Field(
        default=(), description="Whose API keys are known; with any, a request needs one. None: everybody may ask."
    )
    accounts: AccountSettings | None = Field(
        default_factory=AccountSettings, description="Usage records and limits; null: nothing is counted."
    )
    batches: BatchSettings | None = Field(
        default_factory=BatchSettings, description="Files and batches of requests; null: their routes answer 404."
    )
    slo: SloSettings | None = Field(default=None, description="What answers are held against; null: nothing.")
    tracing: TracingSettings | None = Field(default=None, description="Where traces go; null: nowhere.")
    log_prompts: bool = Field(
        default=False, description="Whether the text of every prompt is written to the log of its gateway."
    )
    allow_anonymous: bool = Field(
        default=False, description="Whether `antiphon serve` listens beyond this machine though no tenant is known."
    )
    allowed_hosts: tuple[HostName, ...] | None = Field(
        default=None,
        description="Names in `Host` that are answered to, besides addresses and localhost; `*.name` for all under it. "
        "null: any, but none without `tenants` and `allow_anonymous`.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="Origins whose pages may ask from browsers (CORS), each `https://host[:port]`; `*` for all, which "
        "needs `tenants` or `allow_anonymous`.",
    )
    admin_key_sha256: KeyDigest | None = Field(
        default=None,
        description="SHA-256 of the key that admin routes need; null: of ANTIPHON_ADMIN_KEY, where that is set.",
    )
    limits: LimitSettings = Field(default_factory=LimitSettings, description="Bounds on one HTTP request.")
    default_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds after which an unfinished request is given up; null: never."
    )
    max_resumes: int = Field(
        default=3, ge=0, description="How often a generation moves to another replica after its own has died."
    )

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if not self.models:
            raise ValueError("models must declare at least one base model")
        names = [name for model in self.models for name in (model.name, *(a.name for a in model.adapters))]
        names += [reranker.name for reranker in self.rerankers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"names of models, adapters and cross-encoders must be unique: {', '.join(twice)}")
        keys = [key for tenant in self.tenants for key in tenant.keys_sha256]
        tenants = [tenant.name for tenant in self.tenants]
        if len(set(keys)) < len(keys) or len(set(tenants)) < len(tenants):
            raise ValueError("tenants must have names and keys of their own")
        limited = [tenant.name for tenant in self.tenants if tenant.limits != TenantLimitSettings()]
        if limited and self.accounts is None:
            raise ValueError(f"tenants[{limited[0]}].limits need `accounts`, which is null")
        if "*" in self.allowed_origins and not self.tenants and not self.allow_anonymous:
            raise ValueError(
                "allowed_origins: with '*' every page that somebody visits could ask: name the origins, give `tenants` "
                "with API keys, or set `allow_anonymous: true`"
            )
        return self
