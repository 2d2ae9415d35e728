"""Finds the folder in which this user's programs and kernels are kept between starts. Does not import jax."""

import logging
import os
import stat
import tempfile
from pathlib import Path

USER_FOLDER = "~/.cache/meshserve"


def user_folder(name: str = USER_FOLDER) -> Path:
    """Returns the folder of a name that may begin with `~`, for the user's home, in which case it exists.

    Containers often run as a user whom the system does not know, and who has no home, or one that belongs to another
    user. Instead of a folder there, they get one among the temporary files, to which no other user can write.

    Raises:
      PermissionError: The temporary folder is not this user's own. The message says what to do.
    """
    if not name.startswith("~"):
        return Path(name)
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except (RuntimeError, OSError) as error:  # RuntimeError: there is no home
        folder = Path(tempfile.gettempdir()) / f"meshserve-{os.getuid()}"
        logging.getLogger(__name__).info("%s is used instead of %s: %s", folder, name, error)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # of a link itself, which another user may have made
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} belongs to another user, or others may write to it. Remove it, or set HOME to a directory of "
            "this user."
        )
    return folder
