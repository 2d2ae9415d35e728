"""Stored programs are loaded without being traced, found by all that matters, and never used if they are damaged."""

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from meshserve.kernels.cuda import preparation
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program import program_key, program_store
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.program.program_key import NoKeyError, digest_of, environment_digest
from meshserve.runtime.program.program_store import ProgramStore, start_name
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_here
from meshserve.runtime.weights.locate import find_model
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh
from tests.test_layout import PACKAGES
from tests.waiting import WAIT_SECONDS

X = np.arange(6, dtype=np.float32)
PROGRAM = ("double", 0)


@dataclasses.dataclass(frozen=True)
class Declared:
    factor: float
    mesh: Mesh

    def to_lower(self) -> dict[tuple[str, int], Callable[[], jax.stages.Lowered]]:
        return {PROGRAM: partial(jax.jit(lambda x: x * self.factor).lower, jax.ShapeDtypeStruct(X.shape, X.dtype))}


def run(folder: Path, factor: float = 2.0) -> tuple[np.ndarray, int]:
    """Returns the result of the program, and how many programs were loaded instead of traced."""
    mesh = make_mesh(1)
    store, declared = ProgramStore(folder, mesh), Declared(factor, mesh)
    with CompileWatch() as watch:
        program = store.compiled(declared, declared.to_lower())[PROGRAM]
        return np.asarray(program(jnp.asarray(X))), watch.counts.num_loaded


def stored(folder: Path) -> Path:
    (path,) = folder.rglob("*.program")
    return path


def test_a_stored_program_is_loaded_and_not_traced(tmp_path: Path):
    result, num_loaded = run(tmp_path)
    assert num_loaded == 0 and (result == 2 * X).all()
    mesh = make_mesh(1)

    def never() -> jax.stages.Lowered:
        raise AssertionError("a stored program is not lowered")

    with CompileWatch() as watch:
        program = ProgramStore(tmp_path, mesh).compiled(Declared(2.0, mesh), {PROGRAM: never})[PROGRAM]
        assert (np.asarray(program(jnp.asarray(X))) == 2 * X).all()
        assert watch.counts.num_loaded == 1


def test_another_program_is_not_taken_for_it(tmp_path: Path):
    run(tmp_path)
    result, num_loaded = run(tmp_path, 3.0)
    assert num_loaded == 0 and (result == 3 * X).all()
    assert len(list(tmp_path.rglob("*.program"))) == 2


def test_jax_cache_has_no_part_in_what_is_stored(tmp_path: Path):
    """A program that jax loaded from its own cache would be stored without its functions."""
    mesh = make_mesh(1)
    declared = Declared(2.0, mesh)
    declared.to_lower()[PROGRAM]().compile()  # now jax has it
    with CompileWatch() as watch:
        ProgramStore(tmp_path, mesh).compiled(declared, declared.to_lower())
        assert watch.counts.num_cache_hits == 0 and watch.counts.num_compiles == 1
    assert run(tmp_path)[1] == 1
    with CompileWatch() as watch:
        declared.to_lower()[PROGRAM]().compile()
        assert watch.counts.num_cache_hits == 1, "it is used again for other programs"


def test_sources_of_all_that_programs_are_made_of_are_in_the_digest():
    """Packages import only those before them; of these, two have no part in a program."""
    used = {each.partition("/")[2] for each in program_key._FOLDERS if each.startswith("runtime/")}
    assert used == set(PACKAGES[: PACKAGES.index("draft") + 1]) - {"supervision", "text"}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_damaged_file_is_told_removed_and_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Bits are flipped all over the file, and it is cut off at many lengths, as by a full disk or a crash."""
    run(tmp_path)
    path = stored(tmp_path)
    whole = path.read_bytes()
    positions = np.random.default_rng(0).integers(0, 8 * len(whole), 12).tolist()
    damaged = [flipped(whole, bit) for bit in (0, 8 * len(whole) - 1, 8 * 30, *positions)]
    damaged += [whole[:length] for length in (0, 1, 19, 20, 51, 52, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"\0", b"\0" * len(whole)]
    for content in damaged:
        path.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            result, num_loaded = run(tmp_path)
        assert num_loaded == 0 and (result == 2 * X).all()
        assert f"{path} is compiled again, because the file cannot be used: it is" in caplog.text
        assert run(tmp_path)[1] == 1, "the program is stored again"


def test_a_file_of_another_program_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path)
    path = stored(tmp_path)
    run(tmp_path / "other", 3.0)
    path.write_bytes(stored(tmp_path / "other").read_bytes())
    result, num_loaded = run(tmp_path)
    assert num_loaded == 0 and (result == 2 * X).all()
    assert "or another program's" in caplog.text


def test_what_is_no_file_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path)
    path = stored(tmp_path)
    path.unlink()
    path.mkdir()
    result, num_loaded = run(tmp_path)
    assert num_loaded == 0 and (result == 2 * X).all()
    assert "a directory" in caplog.text


def test_a_folder_that_cannot_be_written_to_serves_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.INFO):
        result, _ = run(tmp_path / "file")
    assert (result == 2 * X).all() and caplog.text.count("compiled programs are not kept in") == 1


def test_what_a_program_calls_is_prepared_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """XLA looks up the calls of a program while it loads it, and nothing is traced that would register them."""
    monkeypatch.setattr(preparation, "prepared", lambda: ("kernels-1.so", "cuBLASLt"))
    run(tmp_path)
    done: list[object] = []

    def prepare(names: tuple[str, ...]) -> tuple[str, ...]:
        done.append(names)
        return ()

    def load(*arguments: Any, **options: Any) -> jax.stages.Compiled:
        done.append("loaded")
        return loading(*arguments, **options)

    loading = serialize_executable.deserialize_and_load
    monkeypatch.setattr(preparation, "prepare", prepare)
    monkeypatch.setattr(serialize_executable, "deserialize_and_load", load)
    assert run(tmp_path)[1] == 1
    assert done == [("kernels-1.so", "cuBLASLt"), "loaded"]


def test_a_program_whose_kernels_are_not_here_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(preparation, "prepared", lambda: ("kernels-1.so",))
    monkeypatch.setattr(preparation, "prepare", tuple)
    run(tmp_path)
    result, num_loaded = run(tmp_path)
    assert num_loaded == 0 and (result == 2 * X).all()
    assert "it calls kernels that are not here: kernels-1.so" in caplog.text


def test_where_stored_programs_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    mesh = make_mesh(1)

    def is_used(choice: str, folder: Path | None = tmp_path) -> bool:
        return ProgramStore.of(folder, mesh, choice) is not None

    assert is_used("auto") and is_used("on") and not is_used("off") and not is_used("on", None)
    assert not caplog.text
    monkeypatch.setattr(program_store, "AUTOMATIC_PLATFORMS", ())  # as on GPUs
    assert is_used("on") and not is_used("auto") and not is_used("off")
    assert "programs are loaded without tracing, which was not tried on cpu" in caplog.text
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not is_used("on")


@contextlib.contextmanager
def jax_settings(**settings: str) -> Iterator[None]:
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_programs_are_compiled_with_the_caches_of_xla(tmp_path: Path):
    """On GPUs, jax tells XLA to keep kernels and autotuning results only where it looks in its own cache."""
    mesh = make_mesh(1)
    declared = Declared(5.0, mesh)
    given = []

    class Lowered:
        def compile(self, options: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
            given.append(options)
            return declared.to_lower()[PROGRAM]().compile(options)

    with jax_settings(jax_persistent_cache_enable_xla_caches="none"):
        ProgramStore(tmp_path / "none", mesh).compiled(declared, {PROGRAM: Lowered})
    folder = str(tmp_path / "xla")
    with jax_settings(jax_persistent_cache_enable_xla_caches="all", jax_compilation_cache_dir=folder):
        program = ProgramStore(tmp_path / "all", mesh).compiled(declared, {PROGRAM: Lowered})[PROGRAM]
    assert (np.asarray(program(jnp.asarray(X))) == 5 * X).all()
    assert given[0] is None and given[1] == {
        "xla_gpu_kernel_cache_file": str(tmp_path / "xla" / "xla_gpu_kernel_cache_file"),
        "xla_gpu_enable_llvm_module_compilation_parallelism": True,
        "xla_gpu_per_fusion_autotune_cache_dir": str(tmp_path / "xla" / "xla_gpu_per_fusion_autotune_cache_dir"),
    }


def test_programs_of_the_last_start_are_fetched_ahead(tmp_path: Path):
    mesh = make_mesh(1)
    declared = Declared(2.0, mesh)
    first = ProgramStore(tmp_path, mesh)
    first.compiled(declared, declared.to_lower())
    first.remember(start_name(declared))
    second = ProgramStore(tmp_path, mesh)
    with CompileWatch() as watch:
        second.fetch(start_name(declared))
        program = second.compiled(declared, declared.to_lower())[PROGRAM]
        assert watch.counts.num_loaded == 1, "it is loaded once"
    assert (np.asarray(program(jnp.asarray(X))) == 2 * X).all()
    (index,) = tmp_path.rglob("*.index")
    index.write_bytes(b"../../etc/passwd \xff")
    ProgramStore(tmp_path, mesh).fetch(start_name(declared))


def test_programs_of_another_version_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh(1)
    declared = Declared(2.0, mesh)
    first = ProgramStore(tmp_path, mesh)
    first.compiled(declared, declared.to_lower())
    first.remember(start_name(declared))
    monkeypatch.setattr(program_key, "sources_digest", lambda: "of another version")
    second = ProgramStore(tmp_path, mesh)
    with CompileWatch() as watch:
        second.fetch(start_name(declared))
        second.compiled(declared, declared.to_lower())
        assert watch.counts.num_loaded == 0 and watch.counts.num_compiles == 1


def test_a_number_is_kept_with_its_program(tmp_path: Path):
    mesh = make_mesh(1)
    store, declared = ProgramStore(tmp_path, mesh), Declared(2.0, mesh)
    assert store.number(declared, PROGRAM, lambda: 1 << 40) == 1 << 40
    assert store.number(declared, PROGRAM, lambda: 5) == 1 << 40
    (path,) = tmp_path.rglob("*.number")
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    assert store.number(declared, PROGRAM, lambda: 5) == 5


def resolved(**options: Any) -> PlacedServer:
    config = ServeConfig(**{"model": "demo", "tp": 2, "max_running": 4, "max_step_tokens": 64, **options})
    return resolve_here(config, read_model(find_model("demo").small / "config.json"), make_mesh(2))


def described(server: PlacedServer, num_pages: int = 8) -> str:
    return digest_of(server.programs(*server.abstract_params(), server.cache_shape(num_pages)))


def test_programs_of_a_server_differ_in_everything_that_matters():
    base = described(resolved())
    assert described(resolved()) == base
    assert described(resolved(model="demo", port=9, max_waiting=3, seed=4)) == base, "no program depends on these"
    others = [{"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"page_size": 16}, {"max_running": 8}]
    others += [{"max_step_tokens": 128}, {"max_context": 512}, {"draft_tokens": 2}, {"logits_processors": False}]
    digests = {described(resolved(**options)) for options in others} | {described(resolved(), num_pages=9)}
    assert len(digests) == len(others) + 1 and base not in digests


def test_the_environment_matters(monkeypatch: pytest.MonkeyPatch):
    base = environment_digest()
    assert environment_digest() == base
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    flagged = environment_digest()
    monkeypatch.setattr(program_key, "sources_digest", lambda: "of another version")
    assert len({base, flagged, environment_digest()}) == 3


def test_descriptions_are_the_same_in_every_process():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from meshserve.sharding.mesh import use_cpu_devices; use_cpu_devices(8)\n"
        "from meshserve.runtime.program.program_key import environment_digest\n"
        "from tests.runtime.program.test_program_store import described, resolved\n"
        "print(environment_digest(), described(resolved()))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=WAIT_SECONDS)[0].split()[-2:] for process in processes)
    assert first == second and len(first) == 2


def test_functions_are_told_apart_by_what_they_were_made_with():
    def adding(number: int) -> Callable[[int], int]:
        return lambda x: x + number

    assert digest_of(adding(1)) == digest_of(adding(1)) != digest_of(adding(2))
    assert digest_of(partial(max, 1)) != digest_of(partial(max, 2)) != digest_of(partial(min, 2))
    with pytest.raises(NoKeyError, match="object has no description"):
        digest_of(object())
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NoKeyError, match="contains itself"):
        digest_of(endless)
