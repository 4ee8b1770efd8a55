"""Settings of the safety classifier and of cross-encoders, with every default and its unit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from app.settings_node import FolderPath, Placement, PublicName, SettingsNode

ClassifierDtype = Annotated[
    Literal["float32", "bfloat16"],
    Field(
        description="Of weights and products. bfloat16 takes a third of the time on CPUs that multiply it, and moves "
        "probabilities by up to 0.01 or so."
    ),
]


class SafetySettings(SettingsNode):
    """The safety classifier; its fields are those of `deployments.config.SafetyConfig`."""

    name: PublicName = Field(default="guard", description="Name of the classifier in `/v1/moderations`.")
    path: FolderPath = Field(description="Folder of an AutoModelForSequenceClassification checkpoint, or a Hub id.")
    placement: Placement = "deployment"
    mode: Literal["before", "alongside"] = Field(
        default="before",
        description="Screen the input before any engine work, or during prefill while the first byte is held back.",
    )
    threshold: float = Field(default=0.5, ge=0, le=1, description="Probability at which a hazard is flagged.")
    threshold_by_hazard: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="Overrides of `threshold`, by classifier label."
    )
    screen_input: bool = Field(default=True, description="Whether to screen prompts.")
    screen_output: bool = Field(default=True, description="Whether to screen answers, window by window.")
    screen_embeddings: bool = Field(
        default=False, description="Whether to screen embedding inputs; one flagged input refuses the request."
    )
    window_chars: int = Field(
        default=200, ge=1, description="Characters per window of the answer; a window is held back until judged."
    )
    overlap_chars: int = Field(default=50, ge=0, description="Characters shared by adjacent windows.")
    fails_closed: bool = Field(
        default=True, description="Whether to refuse requests while the classifier is unreachable or fails."
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds to wait for a verdict on 2,048 characters; longer texts may take longer.",
    )
    max_batch: int = Field(default=32, ge=1, description="Maximum texts per forward pass.")
    max_tokens: int = Field(
        default=512,
        ge=32,
        description="Tokens judged at once, at most the checkpoint's window. A longer text is judged in overlapping "
        "windows, between which others take their turns.",
    )
    max_chars: int = Field(default=100_000, ge=1, description="Maximum characters per text; longer texts are refused.")
    benign_labels: tuple[str, ...] = Field(default=(), description="Classifier labels that are not hazards.")
    num_threads: int = Field(default=1, ge=1, le=1024, description="CPU threads for the classifier.")
    dtype: ClassifierDtype = "float32"

    @model_validator(mode="after")
    def _windows_can_be_judged(self) -> Self:
        if self.overlap_chars >= self.window_chars:
            raise ValueError(
                f"overlap_chars ({self.overlap_chars}) must be smaller than window_chars ({self.window_chars})"
            )
        if self.window_chars > self.max_chars:
            # The classifier would refuse every full window, and its answer would end with an error.
            raise ValueError(f"window_chars ({self.window_chars}) must be at most max_chars ({self.max_chars})")
        return self


class RerankerSettings(SettingsNode):
    """One cross-encoder for `/v1/score` and `/v1/rerank`, deployed as `Reranker-<name>`."""

    name: PublicName = Field(description="Public model name.")
    path: FolderPath = Field(
        description="Folder of an AutoModelForSequenceClassification checkpoint with one label, or a Hub id."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens per query-document pair; null: the checkpoint's maximum. A pair must be computed "
        "well within `timeout_s`, and a CPU takes minutes for 8192 tokens.",
    )
    max_batch: int = Field(default=32, ge=1, description="Maximum pairs per forward pass.")
    max_chars: int = Field(default=100_000, ge=1, description="Maximum characters of a query, and of a document.")
    timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds to wait for scores of 2,048 characters; more may take longer."
    )
    num_threads: int = Field(default=1, ge=1, le=1024, description="CPU threads for the model.")
    dtype: ClassifierDtype = "float32"
