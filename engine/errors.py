"""The engine's exception hierarchy: the type says whose fault a failure is.

`RequestError` is the caller's fault and is raised before any device work. `OverloadError` is a limit of ours and passes
with time. `CheckpointError` and `ConfigError` end a start with one line. `EngineError` is a bug or a dead device.
The failure of one request inside a step is never an exception: it is a `FinishReason` on an `Emission`.
"""

from functools import partial


class RequestError(ValueError):
    """A request that can never be served as it stands.

    Attributes:
        field: name of the offending request field, as the OpenAI API spells it (`max_tokens`, `messages`).
        code: machine-readable reason (`context_length_exceeded`, `model_not_found`) or None.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.code = code

    @staticmethod
    def about(field: str, words: str, *, code: str | None = None) -> "RequestError":
        """Return the error whose message is the field's name in quotes, then `words`."""
        return RequestError(f"'{field}' {words}", field=field, code=code)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross Serve handles by pickle, which by default calls the class with `args` alone.
        return partial(RequestError, field=self.field, code=self.code), (self.message,)


class GrammarError(RequestError):
    """A grammar that cannot be followed, or no further; the caller that generated it knows which field it is for."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The grammar cannot be followed: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return GrammarError, (self.reason,)


class OverloadError(RuntimeError):
    """The request is refused for lack of capacity; it may be retried later.

    Attributes:
        retry_after_s: when to retry, in seconds from now.
        reason: a label for metrics: "queue_full", "queue_time", "deadline", "replicas_full", "busy", a gateway's "wait"
            and "held", and a classifier's "batch_time".
        is_final: the same request would be refused by an idle server, too.
    """

    def __init__(self, message: str, *, retry_after_s: float, reason: str = "busy", is_final: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.is_final = is_final

    def __reduce__(self) -> tuple[object, ...]:
        again = partial(OverloadError, retry_after_s=self.retry_after_s, reason=self.reason, is_final=self.is_final)
        return again, (self.message,)


class ConfigError(ValueError):
    """Options that are wrong or exclude each other; the message names them."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated, incomplete or of an unknown architecture; the message says which."""


class EngineError(RuntimeError):
    """A bug or a dead device: the replica that sees it reports itself unhealthy."""


class FailedAloneError(EngineError):
    """The failure of one request in a healthy engine: a broken adapter, NaN. The message is for its client."""
