"""Builds the wheel and the source distribution, and uses them as a stranger would: in new environments.

Runs with `--packages` (make test-package), because it downloads every dependency.
"""

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from .waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
LINKS = [path.name for path in (ROOT / "src" / "meshserve").iterdir() if path.is_symlink()]
NOT_PACKAGED = (".clang-format", ".dockerignore", ".gitignore", "MANIFEST.in")  # not needed to build, test or read


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Runs a command outside the repository and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=3 * WAIT_SECONDS
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(autouse=True)
def _only_if_asked(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--packages"):
        pytest.skip("builds and downloads packages; `make test-package` passes --packages")


@dataclasses.dataclass(frozen=True)
class Packages:
    tracked: list[str]  # files of the repository
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Packages:
    """Builds the source distribution from the repository's files, and the wheel from the source distribution."""
    if not pytestconfig.getoption("--packages"):
        pytest.skip("see above")
    folder = tmp_path_factory.mktemp("built")
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], ROOT)
    tracked = sorted({name for name in listed.split("\0") if name and (ROOT / name).exists()})
    for name in tracked:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "tree" / name, follow_symlinks=False)
    run([sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "tree"], folder)
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Packages(tracked, wheel, sdist)


def test_the_source_distribution_is_the_whole_repository(packages: Packages):
    with tarfile.open(packages.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    expected = {name for name in packages.tracked if not name.startswith("src/meshserve/") or name.endswith(".py")}
    expected = {f"src/meshserve/{name}" if name.split("/")[0] in LINKS else name for name in expected}
    assert not (expected - held) - set(NOT_PACKAGED)
    assert {"NOTICE", "LICENSE", "CHANGELOG.md", "Makefile", "docs/operations.md", "tests/conftest.py"} <= held


def test_the_wheel_has_every_module_and_the_licences(packages: Packages):
    with zipfile.ZipFile(packages.wheel) as archive:
        held = set(archive.namelist())
    suffixes = (".py", ".cu", ".cuh", ".html", ".css", ".js", ".svg")
    modules = [name for name in packages.tracked if name.split("/")[0] in LINKS and name.endswith(suffixes)]
    assert len(modules) > 200 and not {f"meshserve/{name}" for name in modules} - held
    weights = "meshserve/runtime/weights/embedded/demo/model.safetensors"
    assert {"meshserve/__init__.py", "meshserve/py.typed", weights} <= held
    licences = {name.rpartition("/")[2] for name in held if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert not [name for name in held if name.split("/")[0] not in ("meshserve",) and ".dist-info/" not in name]


COMPILE = """
import sys
sys.path.insert(0, "wheel")
from pathlib import Path
from meshserve.kernels.cuda import build
print(build.__file__, build.build(Path("built")))
"""


def test_the_cuda_sources_of_the_wheel_compile(packages: Packages, tmp_path: Path):
    """With the compiler of the test extra; no GPU is needed."""
    with zipfile.ZipFile(packages.wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    source, library = run([sys.executable, "-c", COMPILE], tmp_path).split()
    assert source.startswith("wheel") or Path(source).is_relative_to(tmp_path)
    assert (tmp_path / library).stat().st_size > 1 << 20


def interpreter(version: str) -> Path | None:
    """Returns a Python of this version, from pyenv or the PATH."""
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    named = shutil.which(f"python{version}")
    candidates = [*found, *([Path(named)] if named else [])]
    code = f"import sys, venv, ensurepip; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    working = (path for path in candidates if subprocess.run([path, "-c", code], capture_output=True).returncode == 0)
    return next(working, None)


SMOKE = """
import importlib.metadata, json, meshserve
from meshserve import LLM, SamplingParams
from meshserve.client import Client
with LLM("demo", tp=2, cpu_devices=2, page_size=16, max_running=2, max_step_tokens=32, num_pages=64, cache_dir="",
         logits_processors=False) as llm:
    [output] = llm.generate("HAMLET:", SamplingParams(max_tokens=5, temperature=0), use_tqdm=False)
print(len(output.outputs[0].token_ids), importlib.metadata.version("meshserve"), meshserve.__file__)
"""


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request: pytest.FixtureRequest, packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and its dependencies."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"this machine has no Python {request.param}")
    folder = tmp_path_factory.mktemp(f"python{request.param}")
    run([python, "-m", "venv", folder / "venv"], folder)
    installed = folder / "venv" / "bin" / "python"
    run([installed, "-m", "pip", "install", "--quiet", packages.wheel], folder)
    return installed


def check_installed(python: Path, folder: Path) -> None:
    num_tokens, version, file = run([python, "-c", SMOKE], folder).split()
    assert num_tokens == "5" and Path(file).is_relative_to(python.parents[1])
    assert run([python.with_name("meshserve"), "--version"], folder).split()[-1] == version


def test_the_wheel_works(environment: Path, tmp_path: Path):
    check_installed(environment, tmp_path)


def test_the_source_distribution_works(environment: Path, packages: Packages, tmp_path: Path):
    """After the wheel, in the same environment: both need the same dependencies."""
    pip = [environment, "-m", "pip", "--quiet"]
    run([*pip, "uninstall", "--yes", "meshserve"], tmp_path)
    run([*pip, "install", "--no-deps", packages.sdist], tmp_path)
    check_installed(environment, tmp_path)


PROJECT = """
import numpy as np

from meshserve import LLM, RequestOutput, SamplingParams
from meshserve.client import Client, Completion

params = SamplingParams(max_tokens=5, temperature=0.5, stop=["a"], n=2)
llm = LLM("demo", tp=2, cpu_devices=2)
outputs: list[RequestOutput] = llm.generate(["a", "b"], params)
outputs += llm.generate("a") + llm.generate([1, 2]) + llm.generate([[1], [2]], [params, params])
outputs += llm.generate(np.array([1, 2])) + llm.generate([np.array([1]), np.array([2])])
text: str = outputs[0].outputs[0].text
token_ids: tuple[int, ...] = outputs[0].outputs[0].token_ids
answers: list[RequestOutput] = llm.chat([{"role": "user", "content": "a"}], params)
with Client("127.0.0.1:50051") as client:
    done: Completion = client.complete("a", max_tokens=5)
    parts: list[str] = [chunk.text for chunk in client.generate([1, 2], temperature=0.0)]
"""
MISTAKES = """
from meshserve import LLM, SamplingParams
from meshserve.client import Client

SamplingParams(max_token=5)
SamplingParams(temperature="hot")
LLM("demo", tp="2")
number: int = LLM("demo").generate("a")[0].outputs[0].text
Client("127.0.0.1:50051").complete("a", max_tokens="5")
wrong: int = Client("127.0.0.1:50051").complete("a").text
"""
MISTAKEN_LINES = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def project(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A project outside the repository, and the Python of an environment with the wheel and numpy."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "right.py").write_text(PROJECT)
    (folder / "wrong.py").write_text(MISTAKES)
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    wanted = ["numpy", "grpcio>=1.81.1", "protobuf>=6.33.5,<8", "tokenizers", "tqdm"]  # what the annotations name
    run([python, "-m", "pip", "install", "--quiet", *wanted], folder)
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", packages.wheel], folder)
    return folder, python


def check_types(command: Sequence[str | Path], folder: Path, is_error: str) -> None:
    """Checks that a type checker accepts right.py, and finds each mistake of wrong.py and nothing else."""
    for name, lines in (("right.py", []), ("wrong.py", MISTAKEN_LINES)):
        done = subprocess.run([*map(str, command), name], cwd=folder, capture_output=True, text=True)
        errors = [line for line in done.stdout.splitlines() if is_error in line]
        found = sorted({int(error[error.index(f"{name}:") :].split(":")[1]) for error in errors})
        assert found == lines, done.stdout + done.stderr
        assert all(f"{name}:" in error for error in errors), "an error in the package itself"


def test_mypy_knows_the_types(project: tuple[Path, Path]):
    folder, python = project
    check_types([sys.executable, "-m", "mypy", "--strict", "--python-executable", python], folder, ": error:")


def test_pyright_knows_the_types(project: tuple[Path, Path]):
    folder, python = project
    name = next((name for name in ("pyright", "basedpyright") if importlib.util.find_spec(name)), None)
    if name is None:
        pytest.skip("needs the extra package-test")
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    check_types([Path(sys.executable).with_name(name), "--pythonpath", python], folder, " - error")
