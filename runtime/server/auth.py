"""Authenticates callers and enforces permissions and quotas. In: the metadata of a call. Out: a tenant, or an error.

`api/tenants.py` reads the file of tenants and tokens. It is read again when it changes; a token that was removed is
refused from the next call on.
"""

import contextlib
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from ..api.errors import ConfigError, PermissionDeniedError, QuotaExceededError, UnauthenticatedError
from ..api.tenants import ANYBODY, LOCAL, Permission, Tenant, read_tokens

_RETRY_SECONDS = 1.0  # retry hint, fixed because nobody knows when a request will end
_MAX_TOKEN_CHARS = 512

_log = logging.getLogger(__name__)


@dataclass
class _Usage:
    """Requests and tokens of a tenant in flight."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass
class Access:
    """Access control of one server. Its methods run on the event loop.

    Args:
      path: The tokens file. None admits every caller, without a token, as the tenant `tokenless`.
      methods: The permission that each method requires, by its full name, "/package.Service/Method".
      public: Services that require no token.
      now: Returns the current time.
    """

    path: Path | None
    methods: Mapping[str, Permission]
    public: frozenset[str]
    tokenless: Tenant = LOCAL
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self._credentials = read_tokens(self.path) if self.path is not None else ()
        self._stamp = self._file_stamp()
        self._usage: dict[str, _Usage] = {}
        self.methods = MappingProxyType(dict(self.methods))

    def reload(self) -> None:
        """Reads the tokens file again if it has changed. If it is not valid, the previous tokens stay in force."""
        stamp = self._file_stamp()
        if self.path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._credentials = read_tokens(self.path)
            _log.info("read %d tokens from %s", len(self._credentials), self.path)
        except ConfigError as error:
            _log.error("the previous tokens stay in force: %s", error)

    def check(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> Tenant:
        """Checks that a caller may call a method, and returns its tenant.

        Raises:
          UnauthenticatedError: The token is missing, unknown or expired.
          PermissionDeniedError: The tenant lacks the permission.
        """
        service = method.rpartition("/")[0].strip("/")
        if service in self.public:
            return ANYBODY
        tenant = self.tenant(metadata)
        needed = self.methods.get(method, Permission.ADMIN)  # unlisted methods are for administrators
        if needed not in tenant.permissions:
            raise PermissionDeniedError(
                f"{method} needs the permission {needed.value!r}; this caller has "
                f"{', '.join(sorted(permission.value for permission in tenant.permissions)) or 'none'}."
            )
        return tenant

    def tenant(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> Tenant:
        """Returns the tenant of a call.

        Raises:
          UnauthenticatedError: The token is missing, unknown or expired.
        """
        if self.path is None:
            return self.tokenless
        values = [value for key, value in metadata or () if key == "authorization"]
        scheme, _, token = values[0].partition(" ") if len(values) == 1 and isinstance(values[0], str) else ("", "", "")
        if scheme.lower() != "bearer" or not 0 < len(token) <= _MAX_TOKEN_CHARS:
            raise UnauthenticatedError(
                "a call needs the metadata `authorization: Bearer <token>`; send one token with it."
            )
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        # Every digest is compared, each in constant time, so the duration reveals nothing about the tokens.
        found = [item for item in self._credentials if hmac.compare_digest(item.digest, digest)]
        if not found:
            raise UnauthenticatedError("the token is unknown; it may have been revoked. Use a current one.")
        if found[0].expires is not None and found[0].expires <= self.now():
            raise UnauthenticatedError(f"the token expired at {found[0].expires.isoformat()}. Use a current one.")
        return found[0].tenant

    @contextlib.contextmanager
    def in_flight(self, tenant: Tenant) -> Iterator[Callable[[int], None]]:
        """Counts a request against its tenant's quota until the block ends.

        Yields:
          A function that counts tokens as well, once they are known: of the prompt and the longest possible output.

        Raises:
          QuotaExceededError: The request, or its tokens, would exceed the quota.
        """
        usage = self._usage.setdefault(tenant.name, _Usage())
        _within(tenant, "requests", usage.num_requests + 1, tenant.max_requests)
        counted = _Usage(num_requests=1)
        usage.num_requests += 1

        def count_tokens(num_tokens: int) -> None:
            _within(tenant, "tokens", usage.num_tokens + num_tokens, tenant.max_tokens)
            counted.num_tokens += num_tokens
            usage.num_tokens += num_tokens

        try:
            yield count_tokens
        finally:
            usage.num_requests -= counted.num_requests
            usage.num_tokens -= counted.num_tokens

    def _file_stamp(self) -> tuple[int, int, int] | None:
        if self.path is None:
            return None
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _within(tenant: Tenant, what: str, wanted: int, bound: int | None) -> None:
    if bound is not None and wanted > bound:
        raise QuotaExceededError(
            f"{what} in flight would be {wanted}; this tenant may have {bound} (max_{what}). Retry later.",
            f"tenant:{tenant.name}",
            _RETRY_SECONDS,
        )
