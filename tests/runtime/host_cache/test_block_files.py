"""Tests the files that keep a host tier between two runs: what is refused, and what is removed."""

from pathlib import Path

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.host_cache.block_files import BlockFiles, StoredBlock

BLOCK = StoredBlock((b"a" * 32, b"b" * 32), (bytes(range(200)), bytes(range(50, 250))))


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    return BlockFiles(tmp_path / "tier")


def test_a_block_is_read_as_it_was_written(files: BlockFiles) -> None:
    files.write("model", BLOCK)
    (path,) = files.newest_first()
    assert path == files.path_of("model", BLOCK.keys) and path.stat().st_mode & 0o777 == 0o600
    assert files.read("model", path) == BLOCK


def test_every_damaged_byte_is_noticed(files: BlockFiles) -> None:
    files.write("model", BLOCK)
    (path,) = files.newest_first()
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert files.read("model", path) is None, place
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert files.read("model", path) is None, length


def test_another_identity_is_refused(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    files.write("model", BLOCK)
    assert files.read("other", files.newest_first()[0]) is None
    assert "another model, layout, page size or version" in caplog.text


def test_only_named_files_stay_in_their_order(files: BlockFiles, tmp_path: Path) -> None:
    blocks = [StoredBlock((bytes([index]) * 32,), (b"content",)) for index in range(4)]
    for block in blocks:
        files.write("model", block)
    (tmp_path / "tier" / "cut off.unfinished").write_bytes(b"")
    (tmp_path / "tier" / "README").write_bytes(b"")
    paths = [files.path_of("model", block.keys) for block in blocks]
    files.keep_only([paths[2], paths[0], paths[3]])
    assert files.newest_first() == [paths[3], paths[0], paths[2]]
    assert len(list((tmp_path / "tier").iterdir())) == 4
    files.keep_only(())
    assert not files.newest_first()


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 777; it must be writable for this user and for no other"):
        BlockFiles(tmp_path)
