"""Puts Debian's protoc-gen-go into a folder, without installing the package.

    python tests/clients/get_protoc_gen_go.py .venv/bin

Where there is no apt-get, or no package index for it, says so; tests then leave Go out.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 60


def _runs(command: Sequence[str], folder: Path) -> bool:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download = ("apt-get", "download", "protoc-gen-go")
        if not _runs(download, folder):
            _runs(("apt-get", "update"), folder)  # needs root
            _runs(download, folder)
        packages = [str(path) for path in folder.glob("*.deb")]
        if not packages or not _runs(("dpkg", "-x", packages[0], "."), folder):
            print("protoc-gen-go cannot be had from Debian's packages; the code for Go is not generated")
            return
        shutil.copy(folder / "usr" / "bin" / "protoc-gen-go", target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
