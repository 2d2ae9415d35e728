"""TLS credentials of the server, from certificate files that may change while it runs.

The files are read again within a second, by a background task; handshakes read no files, and open connections are not
affected. Replace a file by renaming a new one over it, the key first: a certificate that does not match its key is not
used.
"""

import functools
import logging
import os
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from meshserve.sharding.guarded_files import Stamp, read_guarded, stamp_of

from ..api.errors import ConfigError
from .certificate_dates import Validity, validity

RELOAD_SECONDS = 1.0  # between two looks at files that may change
_MAX_FILE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsContent:
    """What is in the files, checked."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    stamps: tuple[Stamp, ...]  # of these versions

    @property
    def configuration(self) -> Any:
        """The content as grpc takes it."""
        return grpc.ssl_server_certificate_configuration(
            [(self.key, self.certificate)], root_certificates=self.client_ca
        )

    @functools.cached_property
    def validity(self) -> Validity:
        """When the certificate is valid."""
        return validity(self.certificate)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files. With `client_ca`, callers need a certificate signed by it (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> TlsContent:
        """Returns the contents of the files.

        Raises:
          ConfigError: A file is missing or not trusted, the certificate does not match the key, or `client_ca` has no
            certificate.
        """
        try:
            certificate, key = (
                read_guarded(path, _MAX_FILE_BYTES, is_trusted=True) for path in (self.certificate, self.key)
            )
            # grpc would accept anything and fail each handshake later; Python's ssl checks now.
            self.context(certificate.data, key.data)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {self.certificate} with the key {self.key}: {error}."
            ) from None
        if self.client_ca is None:
            return TlsContent(certificate.data, key.data, None, (certificate.stamp, key.stamp))
        try:
            client_ca = read_guarded(self.client_ca, _MAX_FILE_BYTES, is_trusted=True)
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=client_ca.data.decode("ascii"))
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(f"cannot use the certificate authority {self.client_ca}: {error}.") from None
        stamps = (certificate.stamp, key.stamp, client_ca.stamp)
        return TlsContent(certificate.data, key.data, client_ca.data, stamps)

    def context(self, certificate: bytes, key: bytes) -> ssl.SSLContext:
        """Returns a context for servers with this certificate.

        Raises:
          OSError: The certificate does not match the key.
          ConfigError: The key has a passphrase.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not hasattr(os, "memfd_create"):
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_passphrase)
            return context
        with ExitStack() as open_files:  # in memory, since ssl takes names only, and what has a name may have changed

            def name_of(data: bytes) -> str:
                file = open_files.enter_context(os.fdopen(os.memfd_create("meshserve-tls", os.MFD_CLOEXEC), "wb", 0))
                file.write(data)
                return f"/proc/self/fd/{file.fileno()}"

            context.load_cert_chain(name_of(certificate), name_of(key), password=self._refuse_passphrase)
        return context

    def _refuse_passphrase(self) -> str:
        """Raises, where OpenSSL would ask for the passphrase on the terminal."""
        raise ConfigError(f"the key {self.key} has a passphrase; save it without one, readable by the server only.")

    def stamps(self) -> tuple[Stamp, ...]:
        """Returns the stamps of the present versions; empty if a file is missing."""
        found = [stamp_of(path) for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return tuple(stamp for stamp in found if stamp is not None) if None not in found else ()


class Certificates:
    """The certificates of a server, which are read again when their files change.

    Args:
      files: Their files.
      now: Returns the current time.

    Raises:
      ConfigError: The present files cannot be used.
    """

    def __init__(self, files: TlsFiles, now: Callable[[], datetime] = lambda: datetime.now(UTC)):
        self._files, self._now = files, now
        self._lock = threading.Lock()
        self.content = files.read()
        self._refused: tuple[Stamp, ...] = ()  # the versions that were last found unusable
        self._complaint = ""
        self._is_new = False
        self._is_warned = False  # that the certificate is not valid now
        self._warn()

    def reload(self) -> None:
        """Reads the files again if they have changed. If they cannot be used, the previous certificate stays in use."""
        self._warn()
        stamps = self._files.stamps()
        if stamps == self.content.stamps:
            self._complaint = ""
            return
        if stamps and stamps == self._refused:
            return
        try:
            content = self._files.read()
        except ConfigError as error:
            self._refused = stamps
            if str(error) != self._complaint:
                _log.error("the changed certificates are not used: %s", error)
            self._complaint = str(error)
            return
        with self._lock:
            self.content, self._is_new = content, True
        self._refused, self._complaint, self._is_warned = (), "", False
        _log.info("reloaded the certificate %s", self._files.certificate)
        self._warn()

    def credentials(self) -> grpc.ServerCredentials:
        """Returns credentials that use the content of the files from the next handshake after they were reloaded."""
        return grpc.dynamic_ssl_server_credentials(
            self.content.configuration,
            self._taken,
            require_client_authentication=self.content.client_ca is not None,
        )

    def http_context(self) -> ssl.SSLContext:
        """Returns a context of an HTTP port, whose connections use the content of the files that was last read."""
        current: tuple[TlsContent, ssl.SSLContext]

        def made() -> tuple[TlsContent, ssl.SSLContext]:
            content = self.content
            context = self._files.context(content.certificate, content.key)
            if content.client_ca is not None:
                context.load_verify_locations(cadata=content.client_ca.decode("ascii"))
                context.verify_mode = ssl.CERT_REQUIRED
            context.sni_callback = use_current
            return content, context

        def use_current(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            """Gives a new connection the present certificate. ssl calls this at each handshake."""
            nonlocal current
            if current[0] is not self.content:
                current = made()
            connection.context = current[1]

        current = made()
        return current[1]

    def _taken(self) -> Any:
        """Returns a new configuration, or None to keep the present one. grpc calls this at each handshake."""
        if not self._is_new:
            return None
        with self._lock:
            self._is_new = False
            return self.content.configuration

    def _warn(self) -> None:
        """Warns once if the certificate is not valid now."""
        if not self._is_warned and (problem := self.content.validity.problem(self._now())):
            self._is_warned = True
            _log.warning("the certificate %s %s; callers will refuse it. Renew it.", self._files.certificate, problem)


def channel_credentials(content: TlsContent) -> grpc.ChannelCredentials:
    """Returns credentials of a caller that shows the same certificate, and expects one signed by `client_ca`."""
    assert content.client_ca is not None
    return grpc.ssl_channel_credentials(
        root_certificates=content.client_ca, private_key=content.key, certificate_chain=content.certificate
    )
