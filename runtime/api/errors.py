"""The errors of meshserve. Every message says what was received, what is allowed and what to do.

`server/grpc_status.py` maps them to gRPC status codes.
"""

NEEDS_TOKENIZER = (
    "needs a tokenizer, and this server's model directory has no tokenizer.json. Send token ids, or add the file and "
    "restart."
)


class MeshserveError(Exception):
    """Base class of the errors that meshserve raises on purpose."""


class ConfigError(MeshserveError):
    """An option or a combination of options that is not allowed."""


class UnsupportedModelError(MeshserveError):
    """The architecture or an option of a config.json is not implemented."""


class InvalidRequestError(MeshserveError):
    """A request is invalid and can never be served.

    `field` is the invalid field of the request as named in the public API, for example `sampling.top_p`.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class TextTooLongError(InvalidRequestError):
    """A text has more characters than any tokens of the context can have."""


class QueueFullError(MeshserveError):
    """The queue of the server is full. `retry_seconds` suggests when to retry."""

    def __init__(self, message: str, retry_seconds: float):
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DeadlineError(MeshserveError):
    """The caller's deadline passed, or no token can be generated before it."""


class AbortedError(MeshserveError):
    """The caller has aborted the request."""


class UnfinishedError(MeshserveError):
    """A request could not be finished, and others can: `FinishReason.ERROR`. The message contains the reason."""


class EngineStoppedError(MeshserveError):
    """The engine is not running: it is stopping, draining or has failed. The message contains the reason."""


class UnauthenticatedError(MeshserveError):
    """The caller sent no token, or one that is unknown or has expired."""


class PermissionDeniedError(MeshserveError):
    """The caller's token does not permit the method."""


class QuotaExceededError(MeshserveError):
    """The caller's quota is exhausted. `subject` names its owner, and `retry_seconds` suggests when to retry."""

    def __init__(self, message: str, subject: str, retry_seconds: float):
        super().__init__(message)
        self.subject = subject
        self.retry_seconds = retry_seconds


class WrongTaskError(MeshserveError):
    """The model that the server serves has another task than the method needs."""


class UnknownMethodError(MeshserveError):
    """The server has no such RPC; a newer version may have."""


class UnavailableFeatureError(MeshserveError):
    """The server was started without the requested feature, or cannot provide it in its current state."""


class AdapterError(MeshserveError):
    """A request or a method cannot have the adapter (LoRA) that it names; each subclass has its own status."""


class UnknownAdapterError(AdapterError):
    """There is no adapter of that name."""


class InvalidAdapterError(AdapterError):
    """An adapter is damaged, does not fit the served model, or needs something that is not implemented."""


class AdapterExistsError(AdapterError):
    """There is an adapter of that name with another content."""


class AdapterRoomError(AdapterError):
    """The host memory for adapters is full."""


class AdapterChangedError(AdapterError):
    """The adapter of that name has another content than the request asks for."""


class AdaptersOffError(AdapterError):
    """The server was started without adapters."""
