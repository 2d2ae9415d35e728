"""Creates certificates for tests of TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest

from meshserve.runtime.server.tls import TlsFiles


def certificate(
    folder: Path, name: str, authority: str | None = None, address: str = "127.0.0.1", days: int = 1
) -> TlsFiles:
    """Creates a certificate for an address, self-signed or signed by an authority created before."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(days), "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}"]
    if authority is not None:
        command += ["-CA", str(folder / f"{authority}.pem"), "-CAkey", str(folder / f"{authority}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return TlsFiles(certificate=cert, key=key)
