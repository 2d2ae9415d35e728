"""Runs the examples in other languages against real servers, with `--clients` (make test-clients).

Takes npm, and for C++ Debian's gRPC. The servers' programs are compiled without optimisation, see tests/conftest.py.
"""

import asyncio
import contextlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshserve.runtime.api.tenants import new_token
from meshserve.runtime.client.client import AsyncClient, Client, credentials_from
from meshserve.runtime.commands.protos import write_protos
from tests.certificates import certificate
from tests.clients.replica import Replica
from tests.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
EXAMPLES = ROOT / "deploy" / "examples" / "clients"
BUILD = ROOT / "build" / "clients"  # kept, so that packages are installed and C++ is compiled once
CONTRACT = "meshserve/v1/inference.proto"
FILES = (CONTRACT, "google/rpc/status.proto", "google/rpc/error_details.proto")
NUM_STREAMS, NUM_TOKENS = 200, 24
NUM_RESTARTED_TOKENS = 48


@pytest.fixture(autouse=True)
def _only_if_asked(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--clients"):
        pytest.skip("installs packages and compiles; `make test-clients` passes --clients")


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=3 * WAIT_SECONDS)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copied(name: str, language: str = "") -> Path:
    """Copies an example to a folder where it is built, with the protos that it needs."""
    folder = BUILD / name
    shutil.copytree(EXAMPLES / (language or name), folder, dirs_exist_ok=True)
    write_protos(folder / "protos")
    return folder


@dataclass(frozen=True)
class Program:
    """A built example: the commands of its chat, and of its many streams."""

    folder: Path
    chat: Sequence[str]
    streams: Sequence[str]


def typescript() -> Program:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    folder = copied("typescript")
    shutil.copy(HERE / "streams.ts", folder / "src")
    if not (folder / "node_modules").exists():
        run("npm", "install", "--no-audit", "--no-fund", folder=folder)
    run("npm", "run", "build", folder=folder)
    return Program(folder, ("node", "build/chat.js"), ("node", "build/streams.js"))


def cpp() -> Program:
    found = shutil.which("pkg-config") and shutil.which("cmake") and shutil.which("grpc_cpp_plugin")
    if not found or subprocess.run(["pkg-config", "--exists", "grpc++"]).returncode:
        pytest.skip("there is no gRPC for C++ (Debian: libgrpc++-dev protobuf-compiler-grpc cmake pkg-config)")
    folder = copied("cpp")
    shutil.copy(HERE / "streams.cc", folder)
    with (folder / "CMakeLists.txt").open("a") as file:
        file.write("add_executable(streams streams.cc)\ntarget_link_libraries(streams meshserve_client)\n")
    run("cmake", "-B", "build", folder=folder)
    run("cmake", "--build", "build", "--parallel", "2", folder=folder)
    return Program(folder, ("build/chat",), ("build/streams",))


PROGRAMS: dict[str, Callable[[], Program]] = {"typescript": typescript, "cpp": cpp}
DEBIAN_GO, DEBIAN_JARS, DEBIAN_CRATES = (
    Path("/usr/share/gocode"),
    Path("/usr/share/java"),
    Path("/usr/share/cargo/registry"),
)
JARS = (
    "grpc-*", "protobuf", "guava", "failureaccess", "gson", "netty-*", "perfmark-*", "opencensus-*", "geronimo-anno*",
)  # fmt: skip


def go() -> tuple[Path, Sequence[str]]:
    """With Debian's grpc-go, from Debian 13 on: golang-google-grpc-dev protoc-gen-go protoc-gen-go-grpc."""
    plugins = shutil.which("go") and shutil.which("protoc-gen-go-grpc") and shutil.which("protoc-gen-go")
    if not plugins or not (DEBIAN_GO / "src/google.golang.org/grpc/credentials/insecure").exists():
        pytest.skip("there is no Go with grpc-go 1.63 or newer from Debian")
    folder = copied("go/src/example.com/chat", "go")
    (folder / "gen").mkdir(exist_ok=True)
    options = ["--go_out=gen", "--go_opt=paths=source_relative", "--go-grpc_out=gen"]
    run("protoc", "-Iprotos", *options, "--go-grpc_opt=paths=source_relative", CONTRACT, folder=folder)
    setting = ["env", "GO111MODULE=off", "CGO_ENABLED=0", f"GOPATH={BUILD / 'go'}:{DEBIAN_GO}"]
    run(*setting, "go", "build", "-o", "chat", ".", folder=folder)
    return folder, ("./chat",)


def java() -> tuple[Path, Sequence[str]]:
    """With Debian's libgrpc-java protobuf-compiler-grpc-java-plugin libgoogle-gson-java, and a JDK."""
    if not (shutil.which("javac") and shutil.which("grpc_java_plugin")):
        pytest.skip("there is no JDK, or no gRPC for Java from Debian")
    folder = copied("java")
    (folder / "gen").mkdir(exist_ok=True)
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    run("protoc", "-Iprotos", "--java_out=gen", "--grpc-java_out=gen", plugin, *FILES, folder=folder)
    jars = ":".join(str(path) for pattern in JARS for path in sorted(DEBIAN_JARS.glob(f"{pattern}.jar")))
    sources = [path.relative_to(folder) for path in [*folder.glob("gen/**/*.java"), *folder.glob("src/**/*.java")]]
    run("javac", "-nowarn", "-cp", jars, "-d", "classes", *sources, folder=folder)
    return folder, ("java", "-cp", f"{jars}:classes", "Chat")


def rust() -> tuple[Path, Sequence[str]]:
    """With Debian's crates, from Debian 13 on: librust-tonic-types-dev librust-tonic-build-dev librust-rand-dev."""
    if shutil.which("cargo") is None or not list(DEBIAN_CRATES.glob("tonic-0.12*")):
        pytest.skip("there is no cargo, or no tonic from Debian")
    folder = copied("rust")
    (folder / ".cargo").mkdir(exist_ok=True)
    source = f'[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "{DEBIAN_CRATES}"\n'
    (folder / ".cargo" / "config.toml").write_text(source)
    run("cargo", "build", "--offline", folder=folder)
    return folder, ("target/debug/chat",)


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Program:
    if not pytestconfig.getoption("--clients"):
        pytest.skip("see above")
    return PROGRAMS[request.param]()


@dataclass(frozen=True)
class Served:
    replica: Replica
    ca: Path | None = None
    token_file: Path | None = None

    @property
    def flags(self) -> list[str]:
        """What the examples take to connect."""
        return [f"--ca={self.ca}", f"--token-file={self.token_file}"] if self.ca else []

    def split_flags(self) -> list[str]:
        return [part for flag in self.flags for part in flag.split("=", 1)]


@pytest.fixture(scope="module", params=["plain", "tls_and_tokens"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "plain":
        served = Served(Replica())
    else:
        folder = tmp_path_factory.mktemp("tls")
        authority, files = certificate(folder, "authority"), certificate(folder, "server", authority="authority")
        token, lines = new_token("tenant")
        (folder / "tokens.toml").write_text(lines.replace("]\n", ']\npermissions = ["info", "inference"]\n', 1))
        (folder / "token").write_text(token + "\n")
        flags = [f"--tls-cert={files.certificate}", f"--tls-key={files.key}", f"--tokens={folder / 'tokens.toml'}"]
        served = Served(Replica(*flags), authority.certificate, folder / "token")
    try:
        credentials, token = credentials_from(served.ca, served.token_file)
        with Client(served.replica.target, credentials=credentials, token=token) as client:
            client.wait_until_ready(WAIT_SECONDS)
        yield served
    finally:
        served.replica.stop()


@pytest.fixture(scope="module")
def replicas(pytestconfig: pytest.Config) -> Iterator[list[Replica]]:
    pair = [Replica(), Replica()]
    try:
        yield pair
    finally:
        for replica in pair:
            replica.stop()


def expected(target: str, num_tokens: int, ca: Path | None = None, token_file: Path | None = None) -> str:
    """Returns the tokens that the Python client gets, a line for each of the streams of streams.ts."""
    credentials, token = credentials_from(ca, token_file)

    async def answers() -> list[str]:
        async with AsyncClient(target, credentials=credentials, token=token) as client:

            async def one(index: int) -> str:
                messages = [{"role": "user", "content": f"What {index}"}]
                sampling = {"max_tokens": num_tokens, "temperature": 0.9, "top_p": 0.95, "seed": index}
                chunks = client.chat(messages, ignore_eos=True, **sampling)  # type: ignore[arg-type]
                return " ".join([str(token_id) async for chunk in chunks for token_id in chunk.token_ids])

            return await asyncio.gather(*(one(index) for index in range(NUM_STREAMS)))

    return "".join(f"{line}\n" for line in asyncio.run(answers()))


def streams(program: Program, mode: str, served: Served, num_streams: int, num_tokens: int) -> str:
    arguments = [mode, served.replica.target, str(num_streams), str(num_tokens), *served.split_flags()]
    return run(*program.streams, *arguments, folder=program.folder)


def test_the_tokens_of_many_streams_are_those_of_python(program: Program, served: Served):
    wanted = expected(served.replica.target, NUM_TOKENS, served.ca, served.token_file)
    assert streams(program, "plain", served, NUM_STREAMS, NUM_TOKENS) == wanted
    assert streams(program, "resume", served, NUM_STREAMS, NUM_TOKENS) == wanted


def test_cancelled_streams_free_their_pages(program: Program, served: Served):
    assert streams(program, "cancel", served, 50, 400) == "512 of 512 pages free\n"


def test_a_refused_field_is_named(program: Program, served: Served):
    assert streams(program, "refuse", served, 1, 1) == "3 sampling.top_p\n"


def test_the_chat_of_the_example(program: Program, served: Served):
    check_chat(run(*program.chat, served.replica.target, *served.split_flags(), folder=program.folder))


def check_chat(said: str) -> None:
    assert re.search(r"\[FINISH_REASON_(STOP|LENGTH)\]\n# Another.*\n(.*\n)*?.*\.\.\.\n# A refused", said), said
    assert "field sampling.temperature: sampling.temperature: got -1.0" in said


@pytest.mark.parametrize("build", [go, java, rust])
def test_the_chats_of_the_other_examples(build: Callable[[], tuple[Path, Sequence[str]]], served: Served):
    if build is java and served.ca is not None:
        pytest.skip("Debian's Netty finds no ALPN in newer JDKs")
    folder, chat = build()
    said = run(*chat, *served.split_flags(), served.replica.target, folder=folder)
    check_chat(said)


@contextlib.contextmanager
def rolling(replicas: Sequence[Replica], rounds: int) -> Iterator[None]:
    """Restarts the replicas in turn, one at a time, beside the block."""
    failures: list[BaseException] = []

    def roll() -> None:
        try:
            for replica in replicas * rounds:
                replica.restart()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=roll)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failures, failures


def test_a_rolling_restart_loses_and_repeats_nothing(program: Program, replicas: list[Replica]):
    """Repeats the streams until every replica was restarted beside them."""
    for replica in replicas:
        with Client(replica.target) as client:
            client.wait_until_ready(WAIT_SECONDS)
    wanted = expected(replicas[0].target, NUM_RESTARTED_TOKENS)
    target = "ipv4:" + ",".join(replica.target for replica in replicas)
    command = [*program.streams, "resume", target, str(NUM_STREAMS), str(NUM_RESTARTED_TOKENS)]
    outputs: list[tuple[str, str]] = []
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            done = subprocess.run(command, cwd=program.folder, capture_output=True, text=True, timeout=3 * WAIT_SECONDS)
            outputs.append((done.stdout, done.stderr))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        with rolling(replicas, 1):
            pass
    finally:
        ended.set()
        thread.join()
    assert [error for output, error in outputs if output != wanted] == []
    print(f"{len(outputs)} times {NUM_STREAMS} streams: {[error.split() for _, error in outputs]}")
    assert program.streams[0] != "node" or any(not error.startswith("0 resumes") for _, error in outputs)
