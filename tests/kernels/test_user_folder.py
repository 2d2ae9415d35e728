"""The folder for programs and kernels of users with a home, without one, and with one that cannot be used."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest

from meshserve.kernels.cuda.user_folder import user_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder among the temporary files that users without a home get."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"meshserve-{os.getuid()}"


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user_id: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_home_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".cache" / "meshserve"
    assert user_folder("relative") == Path("relative")


def test_a_user_whom_the_system_does_not_know_gets_a_folder_of_their_own(temporary: Path, unknown_user: None):
    assert user_folder() == temporary
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    assert user_folder() == temporary


def test_so_does_a_user_whose_home_cannot_be_used(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "home").touch()  # the superuser, as whom tests may run, can write to every directory
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert user_folder() == temporary


@pytest.mark.parametrize("kind", ["link", "shared"])
def test_a_folder_to_which_others_can_write_is_refused(kind: str, temporary: Path, unknown_user: None):
    """The kernels in it are loaded into the process."""
    if kind == "link":
        temporary.with_name("theirs").mkdir(mode=0o777)
        temporary.symlink_to(temporary.with_name("theirs"))
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it. Remove it, or set HOME"):
        user_folder()
