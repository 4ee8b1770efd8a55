"""One base model as a gateway sees it: its configuration, its tokenizer, and its replicas."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.config import ModelConfig
from deployments.gateway.dialect import Dialect
from deployments.gateway.prompt_encoder import PromptEncoder
from deployments.gateway.resumption import TokenSource
from deployments.gateway.token_checks import check_vocabulary
from deployments.generation import PREDICTION_FIELD, ChatPrompt, GenerationRequest, TextPrompt
from deployments.tokenizer.text_codec import TextCodec
from engine.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model as a gateway sees it."""

    config: ModelConfig
    codec: TextCodec
    dialect: Dialect
    encoder: PromptEncoder
    source: TokenSource

    async def encode(self, prompt: ChatPrompt | TextPrompt, flow: Hashable) -> Sequence[int]:
        """Return the token ids of a prompt; as `PromptEncoder.encode`."""
        return await self.encoder.encode(self.codec, prompt, flow)

    async def prediction_ids(self, text: str, flow: Hashable) -> Sequence[int]:
        """Return the token ids of a predicted output, which the engine may use as draft tokens; empty for no text.

        Raises:
            RequestError: it is longer than the context, or cannot be encoded for this model.
            UnavailableError: the tokenizer cannot be reached.
        """
        if not text:
            return ()
        field, limit = PREDICTION_FIELD, self.config.max_model_len
        try:
            token_ids = await self.encode(TextPrompt(text=text, has_special_tokens=False), flow)
        except RequestError as error:
            raise RequestError.about(field, f"is refused: {error.message}") from None
        check_vocabulary(token_ids, self.config.vocab_size, field=field)
        if len(token_ids) > limit:
            raise RequestError.about(
                field, f"has {len(token_ids)} tokens, but this model's maximum context length is {limit} tokens."
            )
        return token_ids

    def closed(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with sampling parameters that it leaves open set to the model's defaults."""
        defaults: dict[str, Any] = {n: value for n, value in self.config.sampling.items() if n in request.open_params}
        return replace(request, params=replace(request.params, **defaults)) if defaults else request
