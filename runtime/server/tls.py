"""TLS of the server, with certificates that may change while it runs.

Each handshake looks whether the files have changed; open connections keep what they were made with, so nobody is
disturbed. Replace a file by renaming a new one over it, key first: a pair that does not fit together is left unused.
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
    """PEM files. With `client_ca`, callers must show a certificate that it signed (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> Any:
        """What they hold, as grpc's certificate configuration.

        Raises:
          ConfigError: a file is missing, certificate and key do not belong together, or no authority is in its file.
        """
        try:
            # grpc accepts anything and fails each handshake later; Python's ssl tells at once.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password=self._refuse_passphrase)
            certificate, key = self.certificate.read_bytes(), self.key.read_bytes()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate {self.certificate} with the key {self.key}: {error}.") from None
        client_ca = None
        if self.client_ca is not None:
            try:
                client_ca = self.client_ca.read_bytes()
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=client_ca.decode("ascii"))
            except (OSError, ValueError) as error:  # an SSLError is an OSError
                raise ConfigError(f"the authority {self.client_ca}: {error}.") from None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)

    def _refuse_passphrase(self) -> str:
        """Instead of OpenSSL's question on the terminal, which nobody may read."""
        raise ConfigError(f"the key {self.key} has a passphrase; write it without one, readable by the server alone.")

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a file does."""
        paths = [path for path in (self.certificate, self.key, self.client_ca) if path is not None]
        try:
            return tuple((stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in paths))
        except OSError:
            return ()


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files.

    Raises:
      ConfigError: they cannot be used as they are now.
    """
    used = told = files.stamp()

    def changed() -> Any:
        """grpc asks at each handshake; None keeps what it has."""
        nonlocal used, told
        stamp = files.stamp()
        if stamp == used:
            return None
        try:
            configuration = files.read()
        except ConfigError as error:
            if stamp != told:  # once for each state of the files; they are read again at the next handshake
                _log.error("the certificates stay as they were: %s", error)
            told = stamp
            return None
        used = stamp
        _log.info("read the certificate %s again", files.certificate)
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        files.read(), changed, require_client_authentication=files.client_ca is not None
    )


def mutual_credentials(files: TlsFiles) -> tuple[grpc.ServerCredentials, grpc.ChannelCredentials]:
    """Of both ends of a connection between equals: each shows the certificate, and wants one that `client_ca` signed.

    Raises:
      ConfigError: as `server_credentials`.
    """
    server = server_credentials(files)  # reads and checks the files
    assert files.client_ca is not None
    channel = grpc.ssl_channel_credentials(
        root_certificates=files.client_ca.read_bytes(),
        private_key=files.key.read_bytes(),
        certificate_chain=files.certificate.read_bytes(),
    )
    return server, channel
