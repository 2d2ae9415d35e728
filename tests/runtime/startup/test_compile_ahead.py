"""Tests `meshserve compile`: a server finds all programs in its folder, copied and read-only, and traces none."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.compile_cache import CompileWatch
from meshserve.runtime.startup.compile_ahead import compile_ahead
from meshserve.runtime.startup.launch import launch

OPTIONS: dict[str, Any] = {
    "model": "demo", "tp": 2, "max_running": 2, "max_step_tokens": 2, "page_size": 8, "num_pages": 6, "max_context": 48,
    "logits_processors": False, "generation_config": "off",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder_of_options() -> Iterator[None]:
    """Lets jax open the folder that the options name, and afterwards that of the other tests."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: jax.config.values[name] for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_server_traces_nothing_with_a_copy_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made, mounted = tmp_path / "made", tmp_path / "mounted"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if value is not False]
    assert main(["compile", *flags, "--no-logits-processors", f"--cache-dir={made}", "--max-waiting=7"]) == 0
    assert f"{made} has 4 programs" in capsys.readouterr().out
    shutil.copytree(made, mounted)
    files = {path: path.read_bytes() for path in mounted.rglob("*") if path.is_file()}
    with CompileWatch() as watch:
        launched = launch(ServeConfig(**OPTIONS, cache_dir=str(mounted)), lambda outputs: None)
        launched.close()
        assert watch.counts.num_loaded == 4 and watch.counts.num_compiles == 0
    assert {path: path.read_bytes() for path in mounted.rglob("*") if path.is_file()} == files, "it writes nothing"


def test_what_cannot_be_filled_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for options, message in [
        ({"cache_dir": ""}, "set --cache-dir"),
        ({"cache_dir": str(tmp_path / "file" / "folder")}, "Not a directory"),
        ({"coordinator": "h:1", "cache_dir": str(tmp_path)}, "leave out --coordinator"),
    ]:
        with pytest.raises(ConfigError, match=message):
            compile_ahead(ServeConfig(**{**OPTIONS, **options}))
