"""What can go wrong, as types. Every message says what was got, what is allowed and what to do.

`server.GRPC_STATUS` is the one table that maps these to gRPC codes.
"""


class MeshserveError(Exception):
    """Base of every error that meshserve raises on purpose."""


class ConfigError(MeshserveError):
    """A flag, TOML key or combination of options that cannot be served."""


class UnsupportedModelError(MeshserveError):
    """A config.json that names an architecture or option meshserve does not implement."""


class InvalidRequestError(MeshserveError):
    """A request that can never be served as it stands.

    `field` is the request field at fault, in the words of the public API (for example `sampling.top_p`).
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class QueueFullError(MeshserveError):
    """The server accepts no more requests for now. `retry_seconds` is a hint for the caller."""

    def __init__(self, message: str, retry_seconds: float):
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DeadlineError(MeshserveError):
    """The caller's deadline passed, or no token can come before it any more."""


class EngineStoppedError(MeshserveError):
    """The engine is not running: it was stopped, is draining, or its loop died. The text carries the reason."""


class UnauthenticatedError(MeshserveError):
    """The caller showed no token, or one that is not known or has expired."""


class PermissionDeniedError(MeshserveError):
    """The caller's token does not permit the method."""


class QuotaExceededError(MeshserveError):
    """The caller has as much in flight as it may. `subject` names whose quota, `retry_seconds` is a hint."""

    def __init__(self, message: str, subject: str, retry_seconds: float):
        super().__init__(message)
        self.subject = subject
        self.retry_seconds = retry_seconds


class UnavailableFeatureError(MeshserveError):
    """This server, as it was started, cannot do what was asked; or not in its present state."""
