"""The layout of the repository, as the rules of the house have it: who may import whom, and where things stand."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = sorted(path for path in (ROOT / "src" / "meshserve").iterdir() if path.suffix != ".py")
FOLDERS = [link.name for link in LINKS]
MAX_LINES = 500

# What these folders may import of ours, beside themselves; the others may import everything.
ALLOWED_IMPORTS: dict[str, set[str]] = {"protos": set(), "kernels": set(), "sharding": set()}

# The packages of runtime, in the order in which imports go down: each may import those before it.
PACKAGES = (
    "api", "text", "scheduler", "model", "weights", "program", "planning", "engine", "telemetry", "server", "cluster",
    "startup", "client", "commands",
)  # fmt: skip
MAX_FILES = 12  # of a package, beside its __init__.py

# What a newcomer reads to understand how a request is served. It must not grow without a reason.
CORE = ("server", "scheduler", "engine", "program", "model")
MAX_CORE_LINES = 6_700


def files(*folders: str) -> list[Path]:
    """Their Python files, but for those that protoc wrote."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


def module_name(path: Path) -> str:
    """Under which a file is imported: meshserve.runtime.program.step."""
    parts = ("meshserve", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported: no bodies of functions, nothing for type checkers alone."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
            yield from statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from statements([*statement.body, *statement.orelse, *statement.finalbody])


def imported_names(path: Path, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full dotted names, the last part of which may be something in a module."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


@pytest.mark.parametrize("folder", sorted(ALLOWED_IMPORTS))
def test_folders_import_only_what_lies_below_them(folder: str):
    for path in files(folder):
        names = [name.split(".") for name in imported_names(path, ast.walk(ast.parse(path.read_text())))]
        ours = {parts[1] for parts in names if parts[0] == "meshserve" and len(parts) > 1}
        assert ours <= {folder} | ALLOWED_IMPORTS[folder], path


@pytest.mark.parametrize("folder", FOLDERS)
def test_our_folders_are_imported_as_parts_of_meshserve(folder: str):
    """A bare `import kernels` would find Hugging Face's package of that name, or nothing."""
    for path in files(folder):
        names = imported_names(path, ast.walk(ast.parse(path.read_text())))
        assert not {name.split(".")[0] for name in names} & set(FOLDERS), path


def test_no_module_imports_itself_by_a_detour():
    paths = {module_name(path): path for path in files(*FOLDERS)}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = imported_names(path, statements(ast.parse(path.read_text()).body))
        used = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = (used & paths.keys()) - {module}
    assert graph["meshserve.runtime.engine.engine"] >= {
        "meshserve.runtime.scheduler.scheduler",
        "meshserve.runtime.program.batch",
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
    assert len(order) == len(paths)


def type_checking_imports(tree: ast.Module) -> set[ast.AST]:
    """Import statements that only type checkers follow."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {node for block in blocks for node in ast.walk(block)}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_those_before_them(package: str):
    """Imports inside functions count, too."""
    allowed = set(PACKAGES[: PACKAGES.index(package) + 1])
    for path in files(f"runtime/{package}"):
        tree = ast.parse(path.read_text())
        left_out = type_checking_imports(tree)
        nodes = (node for node in ast.walk(tree) if node not in left_out)
        names = [name.split(".") for name in imported_names(path, nodes)]
        used = {parts[2] for parts in names if parts[:2] == ["meshserve", "runtime"] and len(parts) > 2}
        assert used <= allowed, f"{path} imports {sorted(used - allowed)}"


def test_every_file_of_runtime_lies_in_a_declared_package():
    assert {path.parent.name for path in files("runtime")} == set(PACKAGES)


def test_packages_are_small_and_basenames_unique():
    folders = [*(f"runtime/{package}" for package in PACKAGES), "sharding", "sharding/checkpoints"]
    seen: dict[str, Path] = {}
    for folder in folders:
        modules = [path for path in sorted((ROOT / folder).glob("*.py")) if path.name != "__init__.py"]
        assert len(modules) <= MAX_FILES, f"{folder} has {len(modules)} files; {MAX_FILES} are allowed"
        for path in modules:
            assert path.name not in seen, f"{path} and {seen[path.name]} have one name"
            seen[path.name] = path


def core_lines() -> dict[str, int]:
    """Lines of each package of the core."""
    return {
        package: sum(len(path.read_text().splitlines()) for path in files(f"runtime/{package}")) for package in CORE
    }


def print_core() -> None:
    """Prints the core's size beside its budget, for `make check`."""
    lines = core_lines()
    parts = ", ".join(f"{package} {number:,}" for package, number in lines.items())
    print(f"core: {sum(lines.values()):,} of {MAX_CORE_LINES:,} lines ({parts})")


def test_the_core_stays_within_its_line_budget():
    lines = core_lines()
    assert sum(lines.values()) <= MAX_CORE_LINES, f"{lines}: {MAX_CORE_LINES} lines are allowed"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("scheduler.scheduler", {"jax", "flax", "numpy", "grpc"}),
        ("scheduler.page_allocator", {"jax", "flax", "numpy", "grpc"}),
        ("api.request", {"jax", "flax", "numpy", "grpc"}),
        ("program.batch", {"jax", "flax", "grpc"}),
        ("server.inference_service", {"jax", "flax"}),
        ("client.client", {"jax", "flax"}),
        ("commands.cli", {"jax", "flax", "transformers"}),  # or --help would take seconds
    ],
)
def test_light_modules_stay_light(module: str, forbidden: set[str]):
    """Nor may what they import bring these in."""
    code = f"import sys, meshserve.runtime.{module}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not forbidden & set(result.stdout.split())


def test_the_package_holds_nothing_but_relative_links_to_the_folders():
    assert {"deploy", "kernels", "protos", "runtime", "sharding"} <= set(FOLDERS)
    for link in LINKS:
        assert link.is_symlink(), link
        assert link.readlink() == Path("..", "..", link.name), link
        assert link.is_dir(), link


def test_the_folders_are_no_packages_of_their_own():
    for folder in FOLDERS:
        assert not (ROOT / folder / "__init__.py").exists(), folder


def test_kernels_is_not_found_from_the_root_of_the_repository():
    code = "import importlib.util; spec = importlib.util.find_spec('kernels'); print(spec and spec.origin)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not result.stdout.startswith(str(ROOT / "kernels"))


def test_files_are_short():
    exempt = {"kernels"}
    for path in files(*(folder for folder in FOLDERS if folder not in exempt)):
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines; {MAX_LINES} are allowed. Split it."


def test_nothing_is_configured_by_environment_variables():
    """Of our own: what the orchestrator says of the cluster is read in one place."""
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for path in set(files("runtime", "sharding", "kernels")) - {ROOT / "runtime" / "cluster" / "membership.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
                assert node.attr not in forbidden, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & forbidden, f"{path}:{node.lineno}"
