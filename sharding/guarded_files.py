"""Opens files that others may have replaced: the only way to what a server reads later than at its start.

A name says nothing about what is there now. A FIFO blocks whoever opens it, a device or an endless file never ends, a
link leads elsewhere, and another user's file says what that user likes. So a file is opened without waiting, must be a
regular one, and is read up to a bound; one that decides over the server must also belong to the server's user or root,
and no one else may write to it. A name that stands in a file of a model's directory, or a link in it, may not lead out
of that directory: who gives away a model would otherwise choose which files of this machine are read.

It lies here, below everything that reads files. Standard library only.
"""

import errno
import grp
import os
import pwd
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CHUNK_BYTES = 1 << 20
_MAX_NAME_CHARS = 1_024
_MAX_SHOWN_CHARS = 100
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link",
}  # fmt: skip


class GuardedFileError(OSError):
    """A file is not what it should be. The message says what it is and what it must be, without its name."""

    def __str__(self) -> str:
        return str(self.strerror)


class Stamp(NamedTuple):
    """Differs between two versions of a file, also between two that differ only in who may read them."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


@dataclass(frozen=True)
class Content:
    """What was in a file, and the stamp of that version."""

    data: bytes
    stamp: Stamp


def open_guarded(
    path: str | os.PathLike[str], *, is_trusted: bool = False, follows_links: bool = True, directory: int | None = None
) -> int:
    """Opens a regular file for reading, without ever waiting, and returns its descriptor.

    Args:
      path: The file.
      is_trusted: Whether what is in it decides over the server. Then only the server's user or root may own the file,
        and no other user may be able to write to it.
      follows_links: Whether the name may be a link.
      directory: Descriptor of the directory to which a relative path belongs.

    Raises:
      GuardedFileError: It is no regular file, or it is one that is not trusted.
      OSError: It does not exist or cannot be opened.
    """
    # Before it is opened: opening a device may have effects, and a FIFO's writer would notice it.
    _check_kind(path, os.stat(path, dir_fd=directory, follow_symlinks=follows_links))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        _check_kind(path, found)  # again, because it may have been replaced
        if is_trusted:
            check_owner(path, found)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_guarded(
    path: str | os.PathLike[str],
    max_bytes: int,
    *,
    is_trusted: bool = False,
    follows_links: bool = True,
    directory: int | None = None,
) -> Content:
    """Reads a regular file of at most `max_bytes`.

    Raises:
      As `open_guarded`.
      GuardedFileError: It is larger.
    """
    descriptor = open_guarded(path, is_trusted=is_trusted, follows_links=follows_links, directory=directory)
    try:
        stamp = _stamp(os.fstat(descriptor))
        chunks: list[bytes] = []
        left = max_bytes + 1
        while left and (chunk := os.read(descriptor, min(left, max(stamp.num_bytes, _CHUNK_BYTES) + 1))):
            chunks.append(chunk)  # mostly all of it
            left -= len(chunk)
    finally:
        os.close(descriptor)
    if not left:
        raise GuardedFileError(errno.EFBIG, f"it has more than {max_bytes} bytes", os.fspath(path))
    return Content(b"".join(chunks), stamp)


def stamp_of(path: str | os.PathLike[str]) -> Stamp | None:
    """Returns the stamp of the present version of a file; None if that cannot be known."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def check_owner(path: str | os.PathLike[str], found: os.stat_result, *, is_group_trusted: bool = False) -> None:
    """Checks that a file or directory belongs to this process's user or root, and that no other user may write to it.

    With `is_group_trusted`, its group may.

    Raises:
      GuardedFileError: It does not, or others may.
    """
    if found.st_uid not in (os.geteuid(), 0):
        raise GuardedFileError(
            errno.EPERM,
            f"it belongs to user {found.st_uid}, who could replace it; it must belong to this server's user, "
            f"{os.geteuid()}, or to root. Change its owner",
            os.fspath(path),
        )
    is_group_safe = is_group_trusted or not found.st_mode & stat.S_IWGRP or _is_own_group(found)
    if found.st_mode & stat.S_IWOTH or not is_group_safe:
        mode = stat.S_IMODE(found.st_mode)
        raise GuardedFileError(
            errno.EPERM, f"it has mode {mode:o}, so that other users may write to it. Run chmod go-w", os.fspath(path)
        )


def check_regular_files(directory: Path, folders: Sequence[str] = ()) -> None:
    """Checks that everything in a directory is a regular file or a directory, or leads to one in the directory.

    For directories whose files are opened by libraries. An entry that leads nowhere is left to them.

    Args:
      directory: The directory.
      folders: Names of directories in it that are checked as well, with all that they contain.

    Raises:
      GuardedFileError: Something is neither, or leads out of the directory.
    """
    entries = sorted(directory.iterdir())
    for folder in folders:
        for place, folder_names, file_names in os.walk(directory / folder):
            entries += [Path(place, name) for name in sorted((*folder_names, *file_names))]
    for entry in entries:
        check_contained(directory, entry)
        try:
            found = entry.stat()
        except OSError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            _check_kind(entry, found)


def check_name(name: object) -> str:
    """Returns a name that stands in a file of a directory, if it can only be that of something in the directory.

    Raises:
      GuardedFileError: It is absolute or leads upwards, or it is no name.
    """
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise GuardedFileError(errno.EINVAL, "it is not the name of a file", _shown(name))
    parts = PurePosixPath(name).parts
    if name.startswith(("/", "~")) or ".." in parts or "\\" in name or "://" in name:
        raise GuardedFileError(
            errno.EPERM, "the name leads out of the model's directory; allowed are names of files in it", _shown(name)
        )
    return name


def check_contained(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Checks that a path below a directory does not leave it by a link. Opens nothing.

    The cache of Hugging Face's hub keeps its files beside the directories of its models (`snapshots/COMMIT`), in
    `blobs`; links to there are followed.

    Raises:
      GuardedFileError: It leaves the directory.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    stores = [each.parent.parent / "blobs" for each in (root, *root.parents) if each.parent.name == "snapshots"]
    if not any(target.is_relative_to(allowed) for allowed in (root, *stores)):
        raise GuardedFileError(
            errno.EPERM,
            "it is a link that leads out of the model's directory. Put the file itself there, or a hard link to it",
            os.fspath(path),
        )


def contained(directory: Path, name: object) -> Path:
    """Returns the path of something in a directory, by a name that stands in a file of the directory.

    Raises:
      GuardedFileError: As `check_name` and `check_contained`.
    """
    path = directory / check_name(name)
    check_contained(directory, path)
    return path


def _shown(name: object) -> str:
    text = repr(name) if not isinstance(name, str) else ascii(name)[1:-1]
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _is_own_group(found: os.stat_result) -> bool:
    """Returns whether the group of a file is one that only this user is in, as many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _check_kind(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise GuardedFileError(errno.EINVAL, f"it is {kind}; it must be a regular file", os.fspath(path))


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
