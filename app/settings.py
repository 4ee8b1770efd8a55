"""The `args` of our application in a Serve config file: one frozen tree with every default and its unit.

Unknown keys are refused. `app.resolved` turns a `Settings` once into the dataclasses of `deployments.config`; code
below `app` does not see it. Paths are relative to the folder in which `serve run` was started, `~` is the home folder.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from app.schemas.tools import MAX_TOOLS
from app.settings_access import AccountSettings, HostName, KeyDigest, Origin, TenantLimitSettings, TenantSettings
from app.settings_classifiers import RerankerSettings, SafetySettings
from app.settings_engine import EngineSettings
from app.settings_node import FolderPath, NamePattern, NodePath, Placement, PublicName, SettingsNode

ToolFormatName = Literal[
    "hermes", "llama3", "mistral", "mistral_args", "nemotron", "functionary", "qwen3_coder", "xlam", "json", "none"
]  # fmt: skip


class AdapterSettings(SettingsNode):
    """One LoRA adapter and the name that clients request."""

    name: PublicName = Field(description="Public name of the adapter, used as `model`.")
    path: FolderPath = Field(description="Folder in PEFT layout, or a Hugging Face Hub id.")


class ModelSettings(SettingsNode):
    """One base model with its adapters, deployed as `Model-<name>`."""

    name: PublicName = Field(description="Public model name.")
    path: FolderPath = Field(description="Folder in Hugging Face layout with safetensors, or a Hub id (`org/name`).")
    tokenizer_path: FolderPath | None = Field(
        default=None, description="Folder of the tokenizer; null: the model's folder."
    )
    chat_template: FolderPath | None = Field(
        default=None, description="File with a chat template (Jinja); null: the tokenizer's."
    )
    adapter_chat_templates: dict[NamePattern, FolderPath] = Field(
        default_factory=dict,
        description="Files with other chat templates for adapters, by name or pattern (`sql-*`); the first match "
        "applies.",
    )
    adapters: tuple[AdapterSettings, ...] = Field(default=(), description="Adapters declared individually.")
    adapter_folder: FolderPath | None = Field(
        default=None, description="Folder of adapters for this model, one per subfolder and named after it."
    )
    tool_format: ToolFormatName | None = Field(
        default=None, description="Tool call format of the model; null: detected from its chat template."
    )
    reasoning_format: Literal["think", "mistral", "seed", "none"] | None = Field(
        default=None, description="How the model marks reasoning content; null: detected from its chat template."
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="Sampling parameters that a request omits: from the checkpoint's generation_config.json (`model`), "
        "or OpenAI's defaults (`openai`).",
    )
    pooling: Literal["last", "mean"] | None = Field(
        default=None,
        description="Pooling of embeddings if a request does not set it: last token, or mean of all; null: as in the "
        "checkpoint's modules.json, else the last token.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="Engine settings.")

    def sources(self) -> dict[str, str]:
        """Return the folders and hub ids of its checkpoints and declared adapters, by their keys."""
        folders = {
            "path": self.path,
            "tokenizer_path": self.tokenizer_path,
            "engine.draft_model": self.engine.draft_model,
        }
        folders |= {f"adapters[{index}].path": adapter.path for index, adapter in enumerate(self.adapters)}
        return {key: folder for key, folder in folders.items() if folder is not None}


class ChannelSettings(SettingsNode):
    """How tokens travel from model replicas to gateways."""

    transport: Literal["tcp", "handle"] = Field(
        default="tcp",
        description="One connection per replica and gateway, or Serve's streaming handles (for closed networks).",
    )
    host: str | None = Field(default=None, description="Address on which gateways listen; null: the node's address.")
    max_buffered_bytes: int = Field(
        default=1 << 20, ge=1024, description="Unread bytes beyond which a slow reader's stream is ended."
    )
    stream_spacing_s: float = Field(
        default=0.0005,
        ge=0,
        le=0.05,
        description="Minimum seconds between two sends to a gateway, per stream in the first, at most 0.05 in total; "
        "an answer's first and last tokens do not wait. 0: tokens are sent after each step.",
    )


class TokenizerSettings(SettingsNode):
    """Where text is tokenized."""

    placement: Placement = "deployment"
    local_chars: int = Field(
        default=4096,
        ge=0,
        description="The gateway itself tokenizes prompts of at most this many characters, where a message counts as "
        "64 more: a call to the deployment would take longer. 0: none.",
    )


SourcePrefix = Annotated[str, StringConstraints(pattern=r"^(?:hf://|(?:s3|gs|https?)://[^/@\s]+/)(?:[^/\s]+/)*$")]
"""A URL prefix; because of the trailing slash, `s3://bucket/` does not match `s3://bucket2/`."""


class RegistrySettings(SettingsNode):
    """Adapters loaded and unloaded while the server runs; their routes need the admin key."""

    folder: FolderPath = Field(
        default=".antiphon", description="Folder for adapter names and files; it outlives the server."
    )
    allowed_folders: tuple[FolderPath, ...] = Field(
        default=(), description="Folders from which adapters may be loaded, besides each model's `adapter_folder`."
    )
    sources: tuple[SourcePrefix, ...] = Field(
        default=(),
        description="URL prefixes from which adapters may be fetched, each with a trailing slash: "
        "hf://org/, s3://bucket/folder/, gs://bucket/, https://host/folder/.",
    )
    max_versions: int = Field(
        default=64,
        ge=2,
        description="Maximum versions per name, besides as many on trial; the oldest without traffic make room for new "
        "ones.",
    )
    max_source_bytes: int = Field(default=2 << 30, ge=1, description="Maximum size of a fetched adapter in bytes.")
    source_timeout_s: float = Field(default=300.0, gt=0, description="Timeout for fetching an adapter in seconds.")
    cache_folder: NodePath = Field(
        default="~/.cache/antiphon/adapters",
        description="Folder for adapter files on each node that does not share `folder`.",
    )
    max_cache_bytes: int = Field(
        default=16 << 30,
        ge=1,
        description="Maximum bytes in `cache_folder`; files used in the last minute stay regardless.",
    )
    watch_period_s: float = Field(
        default=2.0, gt=0, description="Seconds between scans of each model's `adapter_folder`."
    )


class BatchSettings(SettingsNode):
    """Files, batches and stored responses; the actor `Batches` keeps them, and runs batches behind other requests."""

    folder: FolderPath = Field(
        default=".antiphon/batches",
        description="Folder for them; it outlives the server and belongs to one server only.",
    )
    max_file_bytes: int = Field(default=200_000_000, ge=1, description="Maximum size of an uploaded file in bytes.")
    max_tenant_bytes: int = Field(
        default=10_000_000_000,
        ge=1,
        description="Maximum bytes of all files of a tenant; no batch begins or goes on without room.",
    )
    max_lines: int = Field(default=50_000, ge=1, description="Maximum requests per batch.")
    max_unfinished: int = Field(default=8, ge=1, description="Maximum unfinished batches per tenant.")
    max_concurrent_requests: int = Field(
        default=8, ge=1, le=2**14, description="Maximum concurrent requests, all batches together."
    )
    responses_last_s: int | None = Field(
        default=None,
        ge=60,
        le=2**31,
        description="Seconds that a response is stored for `previous_response_id`, unless its request has `store: "
        "false`; null: none is stored.",
    )
    max_response_bytes: int = Field(
        default=1_000_000_000,
        ge=1,
        description="Maximum bytes of all stored responses of a tenant; beyond it, the oldest are dropped.",
    )


class TracingSettings(SettingsNode):
    """OpenTelemetry traces; requires `pip install opentelemetry-exporter-otlp-proto-http`."""

    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://")] = Field(
        description="OTLP/HTTP endpoint of a collector: http://host:4318/v1/traces."
    )
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of answers to trace if the client has not decided."
    )
    service: str = Field(default="antiphon", min_length=1, description="Service name in the traces.")


class SloSettings(SettingsNode):
    """Latency objectives, measured from arrival; answers that meet all of them count as goodput."""

    ttft_s: float | None = Field(default=None, gt=0, description="Seconds to the first token (TTFT).")
    tpot_s: float | None = Field(default=None, gt=0, description="Mean seconds per token after the first (TPOT).")
    e2e_s: float | None = Field(default=None, gt=0, description="Seconds to the end of the answer.")


class LimitSettings(SettingsNode):
    """Limits on one HTTP request; exceeding one returns a 4xx that names the field."""

    max_body_bytes: int = Field(default=4_000_000, ge=1024, description="Maximum bytes of a request body.")
    max_messages: int = Field(default=2048, ge=1, description="Maximum messages per chat.")
    max_prompt_chars: int = Field(default=2_000_000, ge=1, description="Maximum characters of all messages or prompts.")
    max_prompts: int = Field(
        default=64, ge=1, description="Maximum prompts per completions request, texts per moderation request."
    )
    max_embedding_inputs: int = Field(
        default=2048, ge=1, description="Maximum inputs per embeddings or classification request."
    )
    max_documents: int = Field(default=1000, ge=1, description="Maximum pairs per scoring request.")
    max_choices: int = Field(default=128, ge=1, description="Maximum answers per request, all prompts together.")
    max_schema_chars: int = Field(default=65536, ge=1, description="Maximum characters of a schema, regex or grammar.")
    max_schema_depth: int = Field(default=64, ge=1, description="Maximum nesting of objects and arrays in a schema.")
    max_tools: int = Field(default=128, ge=0, le=MAX_TOOLS, description="Maximum tools per chat.")
    max_tools_chars: int = Field(default=262_144, ge=1, description="Maximum characters of all tool schemas together.")
    max_logit_bias: int = Field(default=1024, ge=0, description="Maximum entries of `logit_bias`.")
    max_stop_strings: int = Field(default=16, ge=0, description="Maximum stop strings per request.")
    max_stop_chars: int = Field(default=256, ge=1, description="Maximum characters per stop string.")


class Settings(SettingsNode):
    """All settings under `applications[*].args`."""

    models: tuple[ModelSettings, ...] = Field(description="Base models, each with its adapters.")
    safety: SafetySettings | None = Field(default=None, description="The safety classifier; null: no screening.")
    rerankers: tuple[RerankerSettings, ...] = Field(default=(), description="Cross-encoders that score documents.")
    channel: ChannelSettings = Field(default_factory=ChannelSettings, description="The token channel.")
    tokenizer: TokenizerSettings = Field(default_factory=TokenizerSettings, description="The tokenizer.")
    registry: RegistrySettings | None = Field(
        default_factory=RegistrySettings,
        description="Loading of adapters at run time; null: only adapters known at startup.",
    )
    tenants: tuple[TenantSettings, ...] = Field(
        default=(),
        description="Tenants and their API keys; if there are any, requests need a key. Empty: no key is needed.",
    )
    accounts: AccountSettings | None = Field(
        default_factory=AccountSettings, description="Usage records and limits; null: no accounting."
    )
    batches: BatchSettings | None = Field(
        default_factory=BatchSettings, description="Files and batches; null: their routes return 404."
    )
    slo: SloSettings | None = Field(default=None, description="Latency objectives; null: none.")
    tracing: TracingSettings | None = Field(default=None, description="Tracing; null: off.")
    log_prompts: bool = Field(
        default=False, description="Whether gateways write the text of every prompt to their logs."
    )
    allow_anonymous: bool = Field(
        default=False, description="Whether `antiphon serve` may listen beyond this machine without `tenants`."
    )
    allowed_hosts: tuple[HostName, ...] | None = Field(
        default=None,
        description="Accepted names in `Host`, besides addresses and localhost; `*.name` for all subdomains. null: any "
        "name with `tenants` or `allow_anonymous`, else none.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        description="Origins allowed to send requests from browsers (CORS), each `https://host[:port]`; `*` for all, "
        "which requires `tenants` or `allow_anonymous`.",
    )
    admin_key_sha256: KeyDigest | None = Field(
        default=None,
        description="SHA-256 of the admin key, which admin routes need; null: that of ANTIPHON_ADMIN_KEY, if set.",
    )
    limits: LimitSettings = Field(default_factory=LimitSettings, description="Limits on one HTTP request.")
    default_timeout_s: float | None = Field(
        default=None, gt=0, description="Timeout in seconds of requests that set none; null: no timeout."
    )
    max_resumes: int = Field(
        default=3, ge=0, description="How often a generation may resume on another replica after its own died."
    )

    def sources(self) -> dict[str, str]:
        """Return the folders and hub ids of all checkpoints and declared adapters, by their keys."""
        folders = {
            f"models[{index}].{key}": folder
            for index, model in enumerate(self.models)
            for key, folder in model.sources().items()
        }
        if self.safety is not None:
            folders["safety.path"] = self.safety.path
        return folders | {f"rerankers[{index}].path": reranker.path for index, reranker in enumerate(self.rerankers)}

    @property
    def is_open(self) -> bool:
        """Whether anyone may send requests, though nothing says that this is wanted."""
        return not self.tenants and not self.allow_anonymous

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if not self.models:
            raise ValueError("models must declare at least one base model")
        names = [name for model in self.models for name in (model.name, *(a.name for a in model.adapters))]
        names += [reranker.name for reranker in self.rerankers]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise ValueError(f"names of models, adapters and cross-encoders must be unique: {', '.join(twice)}")
        keys = [key for tenant in self.tenants for key in tenant.keys_sha256]
        tenants = [tenant.name for tenant in self.tenants]
        if len(set(keys)) < len(keys) or len(set(tenants)) < len(tenants):
            raise ValueError("tenants must have unique names and keys")
        limited = [tenant.name for tenant in self.tenants if tenant.limits != TenantLimitSettings()]
        if limited and self.accounts is None:
            raise ValueError(f"tenants[{limited[0]}].limits require `accounts`, which is null")
        if "*" in self.allowed_origins and self.is_open:
            raise ValueError(
                "allowed_origins: '*' lets any web page send requests: list the origins, add `tenants` with API keys, "
                "or set `allow_anonymous: true`"
            )
        return self
