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

from meshserve.sharding.guarded_files import Stamp, stamp_of

from ..api.errors import PermissionDeniedError, QuotaExceededError, UnauthenticatedError
from ..api.tenants import ANYBODY, LOCAL, Credential, Permission, Tenant, TokensFileError, read_tokens

_RETRY_SECONDS = 1.0  # retry hint, fixed because the end of a request is unknown
_MAX_TOKEN_CHARS = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnBehalf:
    """Stands in place of a token where the server itself acts for a tenant. No caller can send one: it is no text."""

    tenant: str


@dataclass
class _Usage:
    """Requests and tokens of a tenant in flight."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass
class Access:
    """Access control of one server. Its methods run on the event loop, except `reload`.

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
        self._credentials: tuple[Credential, ...] = ()
        self._stamp: Stamp | None = None  # of the version of the file that is in force
        self._refused: Stamp | None = None  # of the version that was last found invalid
        self._complaint = ""  # why the present file is not in force, as it was logged
        if self.path is not None:
            self._credentials, self._stamp = read_tokens(self.path)
        self._usage: dict[str, _Usage] = {}
        self.methods = MappingProxyType(dict(self.methods))

    @property
    def limits_adapters(self) -> bool:
        """Whether there are tenants to which some adapters do not exist."""
        return any(credential.tenant.adapters is not None for credential in self._credentials)

    def reload(self) -> None:
        """Reads the tokens file again if it has changed. Not called on the event loop: the file system may hang.

        If the file cannot be read or is not valid, the previous tokens stay in force. What cannot be read is tried
        again each time, and what is not valid once it has changed.
        """
        if self.path is None:
            return
        stamp = stamp_of(self.path)
        if stamp is not None and stamp == self._stamp:
            self._complaint = ""
            return
        if stamp is not None and stamp == self._refused:
            return
        try:
            self._credentials, self._stamp = read_tokens(self.path)
        except TokensFileError as error:
            self._refused = error.stamp
            if str(error) != self._complaint:
                _log.error("the previous tokens stay in force: %s", error)
            self._complaint = str(error)
            return
        self._refused, self._complaint = None, ""
        _log.info("read %d tokens from %s", len(self._credentials), self.path)

    def check(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> Tenant:
        """Checks that a caller may call a method, and returns its tenant.

        Raises:
          UnauthenticatedError: The token is missing, unknown or expired.
          PermissionDeniedError: The tenant lacks the permission.
        """
        if _service_of(method) in self.public:
            return ANYBODY
        tenant = self.tenant(metadata)
        needed = self.methods.get(method, Permission.ADMIN)  # unlisted methods are for administrators
        if needed not in tenant.permissions:
            raise PermissionDeniedError(
                f"{method} needs the permission {needed.value!r}; this caller has "
                f"{', '.join(sorted(permission.value for permission in tenant.permissions)) or 'none'}."
            )
        return tenant

    def is_public(self, method: str) -> bool:
        """Returns whether a method needs no token although others do."""
        return self.path is not None and _service_of(method) in self.public

    def tenant(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> Tenant:
        """Returns the tenant of a call.

        Raises:
          UnauthenticatedError: The token is missing, unknown or expired.
        """
        if self.path is None:
            return self.tokenless
        values = [value for key, value in metadata or () if key == "authorization"]
        if len(values) == 1 and isinstance(values[0], OnBehalf):
            return self.named(values[0].tenant)
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

    def named(self, name: str) -> Tenant:
        """Returns a tenant that has a valid token, for work that goes on without a caller.

        Raises:
          UnauthenticatedError: There is none of this name any more.
        """
        if self.path is None and name == self.tokenless.name:
            return self.tokenless
        now = self.now()
        for item in self._credentials:
            if item.tenant.name == name and (item.expires is None or item.expires > now):
                return item.tenant
        raise UnauthenticatedError(f"the tenant {name!r} has no valid token any more.")

    @contextlib.contextmanager
    def in_flight(self, tenant: Tenant) -> Iterator[Callable[[int], None]]:
        """Counts a request against its tenant's quota until the block ends.

        Yields:
          A function that also counts the tokens of the prompt and the longest possible output once they are known.

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


def _within(tenant: Tenant, what: str, wanted: int, bound: int | None) -> None:
    if bound is not None and wanted > bound:
        raise QuotaExceededError(
            f"{what} in flight would be {wanted}; this tenant may have {bound} (max_{what}). Retry later.",
            f"tenant:{tenant.name}",
            _RETRY_SECONDS,
        )


def _service_of(method: str) -> str:
    return method.rpartition("/")[0].strip("/")
