"""Records profiles of the devices for a viewer such as XProf or Perfetto. Imports jax only to record."""

import threading
from datetime import UTC, datetime
from pathlib import Path

from ..api.errors import UnavailableFeatureError


class Profiler:
    """Records one profile at a time, each in a new folder in `directory`. Callers cannot choose the path."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._current: Path | None = None
        self._lock = threading.Lock()

    def start(self) -> str:
        """Starts recording and returns the folder.

        Raises:
          UnavailableFeatureError: A profile is already being recorded, or the folder cannot be created.
        """
        import jax

        with self._lock:
            if self._current is not None:
                raise UnavailableFeatureError(
                    f"a profile is being recorded to {self._current}; end it with StopProfile first."
                )
            folder = self._directory / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise UnavailableFeatureError(
                    f"cannot create a folder for the profile in {self._directory}: {error.strerror}. Restart with a "
                    "--profile-dir that the server can write to."
                ) from error
            jax.profiler.start_trace(folder)
            self._current = folder
            return str(folder)

    def stop(self) -> str:
        """Stops recording, writes the profile and returns its folder.

        Raises:
          UnavailableFeatureError: No profile is being recorded.
        """
        import jax

        with self._lock:
            if self._current is None:
                raise UnavailableFeatureError("no profile is being recorded; start one with StartProfile.")
            folder, self._current = self._current, None
            jax.profiler.stop_trace()
            return str(folder)
