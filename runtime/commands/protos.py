"""Writes the public protos as a module of buf, from which clients in other languages are generated.

A client needs `inference.proto`, and to read the details of errors also google.rpc's `status.proto` and
`error_details.proto`, which no compiler brings along. Each file lies in the folder that its package names, as buf and
most build tools expect.
"""

from pathlib import Path

import google.rpc  # type: ignore[import-untyped]

import meshserve.protos

from ..api.errors import ConfigError

_BUF = """\
version: v2
modules:
  - path: .
lint:
  use: [STANDARD]
  ignore: [google]
breaking:
  use: [FILE]
"""
SERVICE_CONFIG = "service_config.json"


def public_files() -> dict[str, str]:
    """Returns the texts of the files by their path in the module."""
    ours, googles = (Path(next(iter(package.__path__))) for package in (meshserve.protos, google.rpc))
    return {
        "buf.yaml": _BUF,
        SERVICE_CONFIG: (ours / SERVICE_CONFIG).read_text(encoding="utf-8"),
        "meshserve/v1/inference.proto": (ours / "inference.proto").read_text(encoding="utf-8"),
        "google/rpc/status.proto": (googles / "status.proto").read_text(encoding="utf-8"),
        "google/rpc/error_details.proto": (googles / "error_details.proto").read_text(encoding="utf-8"),
    }


def write_protos(folder: Path) -> list[Path]:
    """Writes the public files below a folder, which is made if need be, and returns their paths.


    Raises:
      ConfigError: A file cannot be written.
    """
    written = []
    for name, text in public_files().items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}. Name a folder of your own.") from None
        written.append(path)
    return written
