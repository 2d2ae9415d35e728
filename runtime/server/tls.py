"""TLS credentials of the server, from certificate files that may change while it runs.

Each handshake checks whether the files have changed; open connections are not affected. Replace a file by renaming a
new one over it, the key first: a certificate that does not match its key is not used.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ..api.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files. With `client_ca`, callers need a certificate signed by it (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> Any:
        """Returns the contents of the files as grpc's certificate configuration.

        Raises:
          ConfigError: A file is missing, the certificate does not match the key, or `client_ca` has no certificate.
        """
        try:
            # grpc would accept anything and fail each handshake later; Python's ssl checks now.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_passphrase)
            certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use the certificate {self.certificate} with the key {self.key}: {error}."
            ) from None
        client_ca = None
        if self.client_ca is not None:
            try:
                client_ca = self.client_ca.read_bytes()
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=client_ca.decode("ascii"))
            except (OSError, ValueError) as error:  # an SSLError is an OSError
                raise ConfigError(f"cannot use the certificate authority {self.client_ca}: {error}.") from None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)

    def _refuse_passphrase(self) -> str:
        """Raises, where OpenSSL would ask for the passphrase on the terminal."""
        raise ConfigError(f"the key {self.key} has a passphrase; save it without one, readable by the server only.")

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Returns a value that changes whenever one of the files does."""
        paths = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in paths))
        except OSError:
            return ()


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns credentials that are reloaded when the files change.

    Raises:
      ConfigError: The present files cannot be used.
    """
    used = logged = files.stamp()

    def changed() -> Any:
        """Returns a new configuration, or None to keep the present one. grpc calls this at each handshake."""
        nonlocal used, logged
        stamp = files.stamp()
        if stamp == used:
            return None
        try:
            configuration = files.read()
        except ConfigError as error:
            if stamp != logged:  # log once per change; the next handshake tries again
                _log.error("the changed certificates are not used: %s", error)
            logged = stamp
            return None
        used = stamp
        _log.info("reloaded the certificate %s", files.certificate)
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        files.read(), changed, require_client_authentication=files.client_ca is not None
    )


def mutual_credentials(files: TlsFiles) -> tuple[grpc.ServerCredentials, grpc.ChannelCredentials]:
    """Returns credentials for both ends of a connection on which each end needs a certificate signed by `client_ca`.

    Raises:
      ConfigError: See `server_credentials`.
    """
    server = server_credentials(files)  # reads and checks the files
    assert files.client_ca is not None
    channel = grpc.ssl_channel_credentials(
        root_certificates=files.client_ca.read_bytes(),
        private_key=files.key.read_bytes(),
        certificate_chain=files.certificate.read_bytes(),
    )
    return server, channel
