"""The tenants of a server, their permissions and limits, and the tokens file that lists them.

The file is TOML:

    [tenants.search]
    permissions = ["inference", "info"]          # and "admin"; default: these two
    max_requests = 64                            # open at the same time; default: no limit
    max_tokens = 500_000                         # prompt and output tokens of these together; default: no limit
    max_priority = 10                            # largest priority of its requests; default: 0, with "admin" 100
    weight = 2.0                                 # of its share of the server beside other tenants; default: 1
    adapters = ["search-*", "shared"]            # names or patterns of the adapters it may use; default: all
    tokens = [
      { sha256 = "4f5e...", expires = 2027-01-31T00:00:00Z },   # created by `meshserve token`
    ]

It contains only digests. Tokens are 32 random bytes, so one round of SHA-256 is as safe as a slow hash.
"""

import dataclasses
import enum
import fnmatch
import hashlib
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from meshserve.sharding.guarded_files import Stamp, read_guarded

from .errors import ConfigError
from .request import MAX_PRIORITY
from .sampling_params import SamplingParams

MAX_TOKENS_FILE_BYTES = 16 << 20
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
_TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Permission(enum.Enum):
    """A permission that a method may require."""

    INFERENCE = "inference"
    INFO = "info"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A tenant and its limits. None means no limit."""

    name: str
    permissions: frozenset[Permission] = frozenset((Permission.INFERENCE, Permission.INFO))
    max_requests: int | None = None
    max_tokens: int | None = None
    max_priority: int | None = None  # None: any for administrators, 0 for others
    weight: float = 1.0  # determines its share of slots, pages and prefill
    adapters: tuple[str, ...] | None = None  # patterns of the names of adapters that it may use; None: all

    def may_use(self, adapter: str) -> bool:
        """Returns whether its requests may name an adapter. In a pattern, * and ? stand for any characters."""
        return self.adapters is None or any(fnmatch.fnmatchcase(adapter, pattern) for pattern in self.adapters)

    @property
    def priority_limit(self) -> int:
        """The largest priority that its requests may have."""
        if self.max_priority is not None:
            return self.max_priority
        return MAX_PRIORITY if Permission.ADMIN in self.permissions else 0

    def bounded(
        self, params: SamplingParams, num_prompt_tokens: int, num_samples: int, max_context: int
    ) -> tuple[SamplingParams, int]:
        """Bounds the output of a request that leaves its length open, so that the tenant's quota can hold it.

        Without this, a request without max_tokens would always be refused if the context is larger than the quota.

        Returns:
          The parameters, and the largest number of prompt and output tokens of all samples together.
        """
        if params.max_tokens is None and self.max_tokens is not None:
            most = self.max_tokens // num_samples - num_prompt_tokens
            if 0 < most < max_context - num_prompt_tokens:
                params = dataclasses.replace(params, max_tokens=most)
        return params, params.total_tokens(num_prompt_tokens, max_context) * num_samples


# The callers of a server without a tokens file: `LOCAL` if it binds a loopback address, `ANYBODY` otherwise.
ANYBODY = Tenant(name="")
LOCAL = Tenant(name="", permissions=frozenset(Permission))


@dataclass(frozen=True, kw_only=True)
class Credential:
    """A token of a tenant, as its digest."""

    tenant: Tenant
    digest: bytes
    expires: datetime | None


class TokensFileError(ConfigError):
    """A tokens file cannot be used. `stamp` is that of the version with invalid content; None if it is not readable."""

    def __init__(self, message: str, stamp: Stamp | None = None):
        super().__init__(message)
        self.stamp = stamp


def read_tokens(path: Path) -> tuple[tuple[Credential, ...], Stamp]:
    """Returns the credentials of a tokens file, and the stamp of the version that they are from.

    Raises:
      TokensFileError: The file cannot be read or is not valid; the message names the place.
    """
    try:
        content = read_guarded(path, MAX_TOKENS_FILE_BYTES, is_trusted=True)
    except OSError as error:
        raise TokensFileError(f"--tokens {path} cannot be read: {error}.") from None
    try:
        return _parsed(content.data), content.stamp
    except RecursionError:
        reason = "its values are nested too deeply"
    except (ValueError, TypeError, AttributeError) as error:
        reason = str(error).rstrip(".")
    raise TokensFileError(f"--tokens {path}: {reason}.", content.stamp)


def _parsed(data: bytes) -> tuple[Credential, ...]:
    """
    Raises:
      ValueError, TypeError, AttributeError, RecursionError: It is not a valid tokens file.
    """
    raw = tomllib.loads(data.decode("utf-8"))
    _known(raw, "the file", {"tenants"})
    credentials = [credential for name, entry in raw.get("tenants", {}).items() for credential in _tenant(name, entry)]
    if not credentials:
        raise ValueError("it holds no token. Create one with `meshserve token`")
    num_uses = Counter(credential.digest for credential in credentials)
    for credential in credentials:
        if num_uses[credential.digest] > 1:
            raise ValueError(f"the token with sha256 {credential.digest.hex()} is listed twice; remove one")
    return tuple(credentials)


def _known(raw: Mapping[str, Any], place: str, keys: set[str]) -> None:
    unknown = sorted(raw.keys() - keys)
    if unknown:
        raise ValueError(f"{place} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(keys))}")


def _tenant(name: str, raw: Mapping[str, Any]) -> Iterator[Credential]:
    if not _TENANT_NAME.fullmatch(name):
        raise ValueError(f"tenant {name!r}: a name has 1 to 64 letters, digits, or any of _.-")
    place = f"tenant {name}"
    _known(raw, place, {"permissions", "max_requests", "max_tokens", "max_priority", "weight", "adapters", "tokens"})
    bounds = {key: raw.get(key) for key in ("max_requests", "max_tokens")}
    priority, weight = raw.get("max_priority"), raw.get("weight", 1.0)
    if priority is not None and (type(priority) is not int or abs(priority) > MAX_PRIORITY):
        raise ValueError(
            f"{place}: max_priority is {priority!r}; allowed is an integer, at most {MAX_PRIORITY} in size"
        )
    if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"{place}: weight is {weight!r}; allowed is a number, {MIN_WEIGHT} to {MAX_WEIGHT}")
    for key, bound in bounds.items():
        if bound is not None and (type(bound) is not int or bound < 1):
            raise ValueError(f"{place}: {key} is {bound!r}; allowed is an integer, 1 or more")
    permissions = frozenset(map(Permission, raw["permissions"])) if "permissions" in raw else ANYBODY.permissions
    tenant = Tenant(
        name=name, permissions=permissions, max_priority=priority, weight=float(weight),
        adapters=_patterns(place, raw.get("adapters")), **bounds,
    )  # fmt: skip
    for entry in raw.get("tokens", ()):
        _known(entry, f"a token of {place}", {"sha256", "expires"})
        digest, expires = bytes.fromhex(entry.get("sha256", "")), entry.get("expires")
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError(f"a token of {place}: sha256 is {entry.get('sha256')!r}; allowed are 64 hex digits")
        if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
            raise ValueError(f"a token of {place}: expires is {expires}; allowed is a time with a zone (00:00:00Z)")
        yield Credential(tenant=tenant, digest=digest, expires=expires)


def _patterns(place: str, patterns: Any) -> tuple[str, ...] | None:
    """Returns the patterns of the adapters that a tenant may use; None for all."""
    if patterns is None:
        return None
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(
            f"{place}: adapters is {patterns!r}; allowed is a list of names, in which * stands for any text"
        )
    return tuple(patterns)


def new_token(tenant: str, *, expires: datetime | None = None) -> tuple[str, str]:
    """Returns a new token, and the lines of the tokens file that admit it.

    Raises:
      ConfigError: The tenant's name is too long or contains other characters than letters, digits, and _.-
    """
    if not _TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"tenant {tenant!r}: a name has 1 to 64 letters, digits, or any of _.-")
    token = secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    until = f", expires = {expires.isoformat()}" if expires is not None else ""
    return token, f'[tenants.{_key(tenant)}]\ntokens = [{{ sha256 = "{digest}"{until} }}]\n'


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name
