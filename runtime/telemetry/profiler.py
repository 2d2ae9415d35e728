"""Records what the devices do, for a profile viewer (XProf, Perfetto). Imports jax only when it records."""

import threading
from datetime import UTC, datetime
from pathlib import Path

from ..api.errors import UnavailableFeatureError


class Profiler:
    """One recording at a time, each in a folder of its own below `directory`. Callers never name a path."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._current: Path | None = None
        self._lock = threading.Lock()

    def start(self) -> str:
        """Begins to record; returns the folder.

        Raises:
          UnavailableFeatureError: a profile is being recorded, or there can be no folder.
        """
        import jax

        with self._lock:
            if self._current is not None:
                raise UnavailableFeatureError(f"a profile is being recorded to {self._current}; StopProfile ends it.")
            folder = self._directory / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise UnavailableFeatureError(
                    f"a profile has no place in {self._directory}: {error.strerror}. Restart with a --profile-dir that "
                    "the server can write to."
                ) from error
            jax.profiler.start_trace(folder)
            self._current = folder
            return str(folder)

    def stop(self) -> str:
        """Writes the profile; returns its folder.

        Raises:
          UnavailableFeatureError: none is being recorded.
        """
        import jax

        with self._lock:
            if self._current is None:
                raise UnavailableFeatureError("no profile is being recorded; StartProfile begins one.")
            folder, self._current = self._current, None
            jax.profiler.stop_trace()
            return str(folder)
