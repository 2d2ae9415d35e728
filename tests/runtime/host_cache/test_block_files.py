"""Tests the files that keep a host tier between two runs: what is refused, what is skipped, and what is removed."""

import hashlib
import hmac
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.host_cache.block_files import BlockFiles, StoredBlock
from meshserve.runtime.host_cache.file_key import file_key

BLOCK = StoredBlock((b"a" * 32, b"b" * 32), (bytes(range(200)), bytes(range(50, 250))))
KEY = b"k" * 32
OTHER_USER = 12_345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def files(directory: Path) -> BlockFiles:
    return BlockFiles(directory, KEY, 1_000)


def signed(fields: Any, rest: bytes = b"") -> bytes:
    """Returns the content of a file with these fields and a right digest."""
    header = json.dumps(fields).encode()
    body = b"meshserve KV 2\n" + len(header).to_bytes(8, "big") + header + rest
    return body + hmac.digest(KEY, body, "sha256")


def test_a_block_is_read_as_it_was_written(files: BlockFiles, directory: Path) -> None:
    assert files.write("model", BLOCK)
    (name,) = files.newest_first()
    assert name == files.name_of("model", BLOCK.keys) and files.has(name)
    assert (directory / name).stat().st_mode & 0o777 == 0o600 and len(list(directory.iterdir())) == 1
    assert files.read("model", name) == BLOCK
    assert BlockFiles(directory, KEY, 1_000).read("model", name) == BLOCK


def test_every_damaged_byte_is_noticed(files: BlockFiles, directory: Path) -> None:
    files.write("model", BLOCK)
    (name,) = files.newest_first()
    path = directory / name
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert files.read("model", name) is None, place
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert files.read("model", name) is None, length


def test_another_identity_is_refused(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    files.write("model", BLOCK)
    assert files.read("other", files.newest_first()[0]) is None
    assert "another model, layout, page size or version" in caplog.text


def test_a_file_that_was_not_signed_with_the_servers_key_is_refused(
    files: BlockFiles, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one with a right digest without a key, nor one of another server."""
    BlockFiles(directory, b"o" * 32, 1_000).write("model", BLOCK)
    (name,) = files.newest_first()
    assert files.read("model", name) is None and "another server has written it" in caplog.text
    body = (directory / name).read_bytes()[:-32]
    (directory / name).write_bytes(body + hashlib.sha256(body).digest())
    assert files.read("model", name) is None
    (directory / name).write_bytes(body + hmac.digest(KEY, body, "sha256"))
    assert files.read("model", name) == BLOCK


@pytest.mark.parametrize(
    "fields",
    [
        [], 5, "text", {"identity": "model"}, {"identity": "model", "keys": [], "part_bytes": 5},
        {"identity": "model", "keys": 7, "part_bytes": [1]}, {"identity": "model", "keys": ["xy"], "part_bytes": []},
        {"identity": "model", "keys": [[]], "part_bytes": ["1"]},
    ],
)  # fmt: skip
def test_fields_that_make_no_sense_cost_one_line(fields: Any, files: BlockFiles, directory: Path, caplog) -> None:
    (directory / "a.kv").write_bytes(signed(fields))
    assert files.read("model", "a.kv") is None
    assert len(caplog.records) == 1 and "a.kv is not used" in caplog.text and "Traceback" not in caplog.text


def test_a_larger_file_is_not_read(files: BlockFiles, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (directory / "a.kv").open("wb") as file:
        file.truncate(1 << 40)
    assert files.read("model", "a.kv") is None and "it has more than" in caplog.text


@pytest.mark.parametrize("kind", ["dangling link", "link", "FIFO", "directory"])
def test_what_is_no_file_is_skipped_and_stops_nothing(
    kind: str, files: BlockFiles, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = files.name_of("model", BLOCK.keys)
    path, target = directory / name, tmp_path / "target"
    if kind == "link":
        target.write_bytes(signed({"identity": "model", "keys": [], "part_bytes": []}))
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    assert files.newest_first() == [] and f"{name} is skipped" in caplog.text and len(caplog.records) == 1
    assert files.read("model", name) is None and not files.has(name)
    files.keep_only([name])
    assert files.write("model", BLOCK) == (kind != "directory")
    assert files.has(name) == (kind != "directory") and not list(directory.glob("*.unfinished"))
    assert target.exists() == (kind == "link"), "what a link leads to is neither written nor removed"
    files.keep_only(())
    assert path.exists() == (kind == "directory")


def test_names_of_unfinished_files_cannot_be_foreseen(
    files: BlockFiles, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if one is taken, the file of that name is not written to."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "same")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / f"{files.name_of('model', BLOCK.keys)}.same.unfinished").symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.write("model", BLOCK)
    assert victim.read_text() == "precious"


@only_root
@pytest.mark.parametrize("owner", [OTHER_USER, 0])
def test_a_file_of_another_user_is_not_used(owner: int, files: BlockFiles, directory: Path, caplog) -> None:
    files.write("model", BLOCK)
    (name,) = files.newest_first()
    os.chown(directory / name, owner, -1)
    assert (files.read("model", name) is None) == (owner == OTHER_USER)
    assert ("it belongs to user 12345" in caplog.text) == (owner == OTHER_USER)


def test_only_named_files_stay_in_their_order(files: BlockFiles, directory: Path) -> None:
    blocks = [StoredBlock((bytes([index]) * 32,), (b"content",)) for index in range(4)]
    for block in blocks:
        files.write("model", block)
    (directory / "cut off.unfinished").write_bytes(b"")
    (directory / "README").write_bytes(b"")
    names = [files.name_of("model", block.keys) for block in blocks]
    files.keep_only([names[2], names[0], names[3]])
    assert files.newest_first() == [names[3], names[0], names[2]]
    assert len(list(directory.iterdir())) == 4
    files.keep_only(())
    assert not files.newest_first()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 777; it must be writable for this user and for no other"):
        BlockFiles(tmp_path, KEY, 1_000)


@only_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Root may write to it, and so may its owner, whatever the files in it are."""
    os.chown(tmp_path, OTHER_USER, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345, and this server runs as user 0"):
        BlockFiles(tmp_path, KEY, 1_000)


def test_files_stay_in_the_directory_that_was_checked(files: BlockFiles, directory: Path, tmp_path: Path) -> None:
    """Another one under its name is not used."""
    directory.rename(tmp_path / "moved")
    directory.mkdir(mode=0o777)
    files.write("model", BLOCK)
    assert len(list((tmp_path / "moved").iterdir())) == 1 and not list(directory.iterdir())


def test_servers_that_share_a_folder_share_the_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [threading.Thread(target=lambda: keys.append(file_key(tmp_path / "new"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1 and len(keys) == 8 and len(keys[0]) == 32
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == keys[0]


@pytest.mark.parametrize("how", ["too short", "too long", "link", "others may write"])
def test_a_key_that_is_not_the_servers_own_is_refused(how: str, tmp_path: Path) -> None:
    file_key(tmp_path)
    (path,) = tmp_path.iterdir()
    if how == "link":
        path.rename(tmp_path / "target")
        path.symlink_to(tmp_path / "target")
    elif how == "others may write":
        path.chmod(0o666)
    else:
        path.write_bytes(b"a" * (31 if how == "too short" else 33))
    with pytest.raises(ConfigError, match=r"host_cache\.key"):
        file_key(tmp_path)
