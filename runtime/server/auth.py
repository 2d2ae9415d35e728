"""Who may call what, and how much at a time. In: the metadata of a call. Out: a tenant, or a refusal.

A tokens file names the tenants, in TOML:

    [tenants.search]
    permissions = ["inference", "info"]          # and "admin"; default: these two
    max_requests = 64                            # open at once; default: no bound
    max_tokens = 500_000                         # of their prompts and outputs together; default: no bound
    tokens = [
      { sha256 = "4f5e...", expires = 2027-01-31T00:00:00Z },   # `meshserve token` makes one
    ]

Only digests are kept. Tokens are 32 random bytes, so one round of SHA-256 is as good as a slow hash. The file is read
again when it changes: a token that has gone from it is refused from the next call on.
"""

import contextlib
import enum
import hashlib
import hmac
import logging
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..api.errors import ConfigError, PermissionDeniedError, QuotaExceededError, UnauthenticatedError

_RETRY_SECONDS = 1.0  # the hint to refused callers: nobody knows when a request ends
_MAX_TOKEN_CHARS = 512
_TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_log = logging.getLogger(__name__)


class Permission(enum.Enum):
    """What a method needs."""

    INFERENCE = "inference"
    INFO = "info"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Whose call it is. None as a bound means no bound."""

    name: str
    permissions: frozenset[Permission] = frozenset((Permission.INFERENCE, Permission.INFO))
    max_requests: int | None = None
    max_tokens: int | None = None


# Everybody, where no tokens are asked for. `ANYBODY` calls from another machine, `LOCAL` from this one.
ANYBODY = Tenant(name="")
LOCAL = Tenant(name="", permissions=frozenset(Permission))


@dataclass(frozen=True, kw_only=True)
class Credential:
    """One token of a tenant."""

    tenant: Tenant
    digest: bytes
    expires: datetime | None


def read_tokens(path: Path) -> tuple[Credential, ...]:
    """The credentials of a tokens file.

    Raises:
      ConfigError: the file cannot be read or says something that has no meaning; the message names the place.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--tokens {path} cannot be read: {error}.") from None
    try:
        _known(raw, "the file", {"tenants"})
        credentials = [
            credential for name, entry in raw.get("tenants", {}).items() for credential in _tenant(name, entry)
        ]
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--tokens {path}: {error}.") from None
    if not credentials:
        raise ConfigError(f"--tokens {path} holds no token. Make one with `meshserve token`.")
    num_uses = Counter(credential.digest for credential in credentials)
    for credential in credentials:
        if num_uses[credential.digest] > 1:
            digest = credential.digest.hex()
            raise ConfigError(f"--tokens {path}: the token of sha256 {digest} is there twice; remove one.")
    return tuple(credentials)


def _known(raw: Mapping[str, Any], place: str, keys: set[str]) -> None:
    unknown = sorted(raw.keys() - keys)
    if unknown:
        raise ValueError(f"{place} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(keys))}")


def _tenant(name: str, raw: Mapping[str, Any]) -> Iterator[Credential]:
    if not _TENANT_NAME.fullmatch(name):
        raise ValueError(f"tenant {name!r}: a name has 1 to 64 letters, digits, or any of _.-")
    place = f"tenant {name}"
    _known(raw, place, {"permissions", "max_requests", "max_tokens", "tokens"})
    bounds = {key: raw.get(key) for key in ("max_requests", "max_tokens")}
    for key, bound in bounds.items():
        if bound is not None and (type(bound) is not int or bound < 1):
            raise ValueError(f"{place}: {key} is {bound!r}; allowed is a whole number, 1 or more")
    permissions = frozenset(map(Permission, raw["permissions"])) if "permissions" in raw else ANYBODY.permissions
    tenant = Tenant(name=name, permissions=permissions, **bounds)
    for entry in raw.get("tokens", ()):
        _known(entry, f"a token of {place}", {"sha256", "expires"})
        digest, expires = bytes.fromhex(entry.get("sha256", "")), entry.get("expires")
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError(f"a token of {place}: sha256 is {entry.get('sha256')!r}; allowed are 64 hex digits")
        if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
            raise ValueError(f"a token of {place}: expires is {expires}; allowed is a time with a zone, as 00:00:00Z")
        yield Credential(tenant=tenant, digest=digest, expires=expires)


def new_token(tenant: str, *, expires: datetime | None = None) -> tuple[str, str]:
    """A fresh token, and the lines for the tokens file that let it in."""
    if not _TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"tenant {tenant!r}: a name has 1 to 64 letters, digits, or any of _.-")
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    until = f", expires = {expires.isoformat()}" if expires is not None else ""
    return token, f'[tenants.{_key(tenant)}]\ntokens = [{{ sha256 = "{digest}"{until} }}]\n'


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name


@dataclass
class _Usage:
    """What a tenant has in flight."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass
class Access:
    """The gate. One for each server; its methods run on the event loop.

    Args:
      path: the tokens file; None asks for none, and lets everybody in as `tokenless`.
      methods: the permission that each method needs, by its full name, "/package.Service/Method".
      public: services that anybody may call.
      now: the clock.
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
        """Reads the file again if it has changed. One that cannot be read leaves everything as it was."""
        stamp = self._file_stamp()
        if self.path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._credentials = read_tokens(self.path)
            _log.info("read %d tokens from %s", len(self._credentials), self.path)
        except ConfigError as error:
            _log.error("the tokens stay as they were: %s", error)

    def check(self, method: str, metadata: Sequence[tuple[str, str | bytes]] | None) -> None:
        """Lets a call through or raises.

        Raises:
          UnauthenticatedError, PermissionDeniedError
        """
        service = method.rpartition("/")[0].strip("/")
        if service in self.public:
            return
        tenant = self.tenant(metadata)
        needed = self.methods.get(method, Permission.ADMIN)  # what is not listed is for nobody else
        if needed not in tenant.permissions:
            raise PermissionDeniedError(
                f"{method} needs the permission {needed.value!r}; this caller has "
                f"{', '.join(sorted(permission.value for permission in tenant.permissions)) or 'none'}."
            )

    def tenant(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> Tenant:
        """Whose call it is.

        Raises:
          UnauthenticatedError: no token, an unknown or an expired one.
        """
        if self.path is None:
            return self.tokenless
        values = [value for key, value in metadata or () if key == "authorization"]
        scheme, _, token = values[0].partition(" ") if len(values) == 1 and isinstance(values[0], str) else ("", "", "")
        if scheme.lower() != "bearer" or not 0 < len(token) <= _MAX_TOKEN_CHARS:
            raise UnauthenticatedError("this server wants `authorization: Bearer <token>` in the metadata of a call.")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        # Every digest is compared, each in constant time: neither how long it takes nor where it ends tells anything.
        found = [item for item in self._credentials if hmac.compare_digest(item.digest, digest)]
        if not found:
            raise UnauthenticatedError("the token is not known to this server; it may have been revoked.")
        if found[0].expires is not None and found[0].expires <= self.now():
            raise UnauthenticatedError(f"the token expired at {found[0].expires.isoformat()}.")
        return found[0].tenant

    @contextlib.contextmanager
    def in_flight(self, tenant: Tenant, num_tokens: int) -> Iterator[None]:
        """Counts a request of so many tokens, prompt and longest output, against its tenant's quota.

        Raises:
          QuotaExceededError: it would exceed it.
        """
        usage = self._usage.setdefault(tenant.name, _Usage())
        _within(tenant, "requests", usage.num_requests + 1, tenant.max_requests)
        _within(tenant, "tokens", usage.num_tokens + num_tokens, tenant.max_tokens)
        usage.num_requests += 1
        usage.num_tokens += num_tokens
        try:
            yield
        finally:
            usage.num_requests -= 1
            usage.num_tokens -= num_tokens

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
            f"{what} in flight would be {wanted}; this caller may have {bound} (max_{what}). Wait until some end.",
            f"tenant:{tenant.name}",
            _RETRY_SECONDS,
        )
