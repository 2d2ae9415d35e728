"""Tests what the opener of files refuses, and that nothing else opens what a server reads later than at its start."""

import ast
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from etils import epath

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.weights.locate import find_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.storage import open_file
from meshserve.sharding.checkpoints.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles
from meshserve.sharding.guarded_files import GuardedFileError, read_guarded, stamp_of
from tests import checkpoints
from tests.runtime.supervision.test_every_task import files_of_the_server
from tests.test_layout import ROOT, parsed

OTHER_USER = 12_345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")

# Where files are opened by other means, and why that is right. Whatever a server reads after its start, or from a
# directory to which others may write, is opened by `guarded_files`.
EXEMPT = {
    "sharding/guarded_files.py": "the opener itself",
    "sharding/checkpoints/storage.py": "remote files, which are neither FIFOs nor of other users",
    "sharding/memory.py": "/sys: the limits of a container",
    "runtime/text/worker_template.py": "/proc and /dev/null",
    "runtime/text/template_renderer.py": "copies that it has made itself",
    "runtime/text/worker_processes.py": "/proc",
    "runtime/startup/accelerators.py": "/proc and /sys",
    "runtime/telemetry/logs.py": "/dev/null",
    "runtime/telemetry/start_timeline.py": "/proc",
    "runtime/program/program_key.py": "sources of the package itself, and /proc",
    "runtime/host_cache/block_files.py": "opens the directory, and makes new files",
    "runtime/host_cache/file_key.py": "makes a new file",
    "runtime/openai/web_page/page_files.py": "files of the package itself",
    "runtime/openai/batches/answer_file.py": "a directory that only the server's user can enter",
    "runtime/openai/batches/batch_lines.py": "the same directory",
    "runtime/openai/batches/batch_run.py": "the same directory",
    "runtime/openai/batches/records.py": "the same directory, which it checks",
    "runtime/weights/locate.py": "copies of remote files",
    "runtime/weights/convert.py": "a command, which ends with its files",
}
READERS = {"read_text", "read_bytes", "safe_open", "loadtxt", "fromfile", "memmap"}  # methods and functions of modules


def openings(path: Path) -> Iterator[str]:
    """Yields the calls by which a file of ours opens files: builtin `open`, `os.open`, `Path.open` with a mode..."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        has_mode = node.args and isinstance(node.args[0], ast.Constant) and str(node.args[0].value)[:1] in "rwax"
        if called in ("open", "os.open", "io.open") or (name in READERS and name != called):
            yield called
        elif name == "open" and has_mode:
            yield called


def test_only_the_opener_opens_what_a_server_reads() -> None:
    found = {str(path.relative_to(ROOT)) for path in files_of_the_server() if [*openings(path)]}
    found -= {name for name in found if name.startswith("kernels/")}  # which read their own sources, to compile them
    assert found == set(EXEMPT), "use guarded_files, or say why not"


def test_an_opening_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("open(a)\nos.open(a, b)\nPath(a).read_text()\nPath(a).open('rb')\nqueues.open(name)\nt.open()\n")
    assert len([*openings(path)]) == 4


def make(kind: str, path: Path) -> None:
    """Makes something of this kind, to which others do not write."""
    if kind == "FIFO":
        os.mkfifo(path, 0o644)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(path))
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "a")
    with pytest.raises(GuardedFileError, match=f"it is a {kind}; it must be a regular file"):
        read_guarded(tmp_path / "a", 100)


def test_links_are_followed_where_they_are_expected_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_guarded(tmp_path / "b", 7).data == b"content"
    with pytest.raises(GuardedFileError, match="it is a link"):
        read_guarded(tmp_path / "b", 7, follows_links=False)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert read_guarded("a", 7, directory=descriptor).data == b"content"
    with pytest.raises(GuardedFileError, match="it is a link"):
        read_guarded("b", 7, directory=descriptor, follows_links=False)
    os.close(descriptor)


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for size in (0, 1, 3 << 20):
        path.write_bytes(b"a" * size)
        assert len(read_guarded(path, size).data) == size
        if size:
            with pytest.raises(GuardedFileError, match=f"it has more than {size - 1} bytes"):
                read_guarded(path, size - 1)


@pytest.mark.parametrize("mode", [0o602, 0o622, 0o666, 0o777])
def test_files_that_others_may_write_to_are_not_trusted(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    path.chmod(mode)
    assert read_guarded(path, 100).data == b"content"
    with pytest.raises(GuardedFileError, match=f"it has mode {mode:o}, so that other users may write"):
        read_guarded(path, 100, is_trusted=True)
    path.chmod(mode & ~0o022)
    assert read_guarded(path, 100, is_trusted=True).data == b"content"


@only_root
def test_files_of_other_users_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"content")
    os.chown(path, OTHER_USER, -1)
    with pytest.raises(GuardedFileError, match="it belongs to user 12345, who could replace it"):
        read_guarded(path, 100, is_trusted=True)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    assert read_guarded(path, 100, is_trusted=True).data == b"content"
    os.chown(path, 0, -1)
    assert read_guarded(path, 100, is_trusted=True).data == b"content", "root's files are trusted"


@only_root
def test_a_group_that_only_the_user_is_in_may_write(tmp_path: Path) -> None:
    """Many systems make such a group for each user, and files that it may write to by default."""
    path = tmp_path / "a"
    path.write_bytes(b"content")
    path.chmod(0o664)
    assert read_guarded(path, 100, is_trusted=True).data == b"content"
    os.chown(path, -1, OTHER_USER)
    with pytest.raises(GuardedFileError, match="it has mode 664"):
        read_guarded(path, 100, is_trusted=True)


def test_stamps_tell_versions_apart(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert stamp_of(path) is None
    path.write_bytes(b"one")
    stamps = [read_guarded(path, 100).stamp]
    assert stamp_of(path) == stamps[0]
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"two")
    os.utime(path, ns=times)  # as if nothing had changed
    stamps.append(read_guarded(path, 100).stamp)
    path.chmod(0o600)
    stamps.append(read_guarded(path, 100).stamp)
    assert len(set(stamps)) == 3


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
@pytest.mark.parametrize("name", [SINGLE_FILE, INDEX_FILE, "an entry of the index"])
def test_a_start_does_not_wait_for_weights_that_are_no_file(kind: str, name: str, tmp_path: Path) -> None:
    model = checkpoints.truncated_demo(tmp_path / "model", 1)
    if name == SINGLE_FILE:
        (model / name).unlink()
    elif name != INDEX_FILE:
        (model / INDEX_FILE).write_text('{"weight_map": {"a": "part.safetensors"}}')
        name = "part.safetensors"
    make(kind, model / name)
    refused = "is not read: it is a link" if kind == "device" else f"cannot be read: it is a {kind}"
    with pytest.raises(CheckpointError, match=f"{name} {refused}"):
        TensorFiles(model)
    with pytest.raises(CheckpointError, match=f"it is a {kind}"):
        open_file(epath.Path(model / name), "")
    if kind != "directory":
        refused = f"{kind}; it must be a regular file|link that leads out"
        with pytest.raises(ConfigError, match=f"{name}: it is a ({refused})"):
            find_model(str(model))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_start_does_not_wait_for_small_files_that_are_none(name: str, tmp_path: Path) -> None:
    model = checkpoints.truncated_demo(tmp_path / "model", 1)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ConfigError, match=f"{name}: it is a FIFO"):
        find_model(str(model))
