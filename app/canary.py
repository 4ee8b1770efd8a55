"""The canary: ask an adapter a question before its name points to it, and check the answer."""

from __future__ import annotations

import uuid

from app.gateway_port import GatewayPort
from app.schemas.adapters import Canary
from app.translation.streaming import collect
from deployments.generation import ChatMessage, ChatPrompt, EndReason, GenerationRequest
from engine.errors import EngineError, RequestError
from engine.request import SamplingParams

TIMEOUT_S = 120.0


async def ask(gateway: GatewayPort, model: str, canary: Canary) -> None:
    """Ask a model the canary's question, with greedy decoding.

    Raises:
        RequestError: it does not answer, or the answer is not as expected.
        OverloadError: the server has no capacity for the question now.
    """
    request = GenerationRequest(
        request_id=f"canary-{uuid.uuid4().hex}",
        model=model,
        prompt=ChatPrompt(messages=(ChatMessage(role="user", content=canary.prompt),)),
        params=SamplingParams(max_tokens=canary.max_tokens, temperature=0.0),
        max_tokens=canary.max_tokens,
        timeout_s=TIMEOUT_S,
    )
    try:
        (answer,) = await collect([gateway.generate(request)])
    except RequestError as error:
        raise _failed(error.message) from error
    except (EngineError, TimeoutError) as error:
        raise _failed("It was not answered.") from error
    if answer.finished.reason is EndReason.CONTENT_FILTER:
        raise _failed("The safety classifier refused the question or the answer.")
    text = answer.reasoning + answer.text
    if canary.expect is not None and canary.expect not in text:
        raise _failed(f"The answer does not contain what is expected; it is {text[:200]!r}.")


def _failed(reason: str) -> RequestError:
    return RequestError(
        f"The adapter has failed its canary, and its name has not been moved to it. {reason}", field="canary"
    )
