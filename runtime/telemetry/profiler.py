"""Records profiles of the devices for a viewer such as XProf or Perfetto. Imports jax only to record."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ..api.errors import UnavailableFeatureError

BetweenSteps = Callable[[Callable[[], None]], None]  # runs a function while the devices have no step


class Profiler:
    """Records one profile at a time, each in a new folder in `directory`. Callers cannot choose the path.

    Profiles begin and end between two steps: on GPUs, CUDA fails if a trace begins while a graph of kernels runs, and
    the process could not go on.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._current: Path | None = None
        self._lock = threading.Lock()

    def start(self, between_steps: BetweenSteps) -> str:
        """Starts recording and returns the folder.

        Raises:
          UnavailableFeatureError: A profile is already being recorded, or the folder cannot be created.
          EngineStoppedError: As `between_steps` raises it.
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
            _do(between_steps, lambda: jax.profiler.start_trace(folder))
            self._current = folder
            return str(folder)

    def stop(self, between_steps: BetweenSteps) -> str:
        """Stops recording, writes the profile and returns its folder.

        Raises:
          UnavailableFeatureError: No profile is being recorded.
          EngineStoppedError: As `between_steps` raises it; the profile goes on.
        """
        import jax

        with self._lock:
            if self._current is None:
                raise UnavailableFeatureError("no profile is being recorded; start one with StartProfile.")
            folder = self._current

            def stop_trace() -> None:
                self._current = None  # also if writing it fails
                jax.profiler.stop_trace()

            _do(between_steps, stop_trace)
            return str(folder)


def _do(between_steps: BetweenSteps, action: Callable[[], None]) -> None:
    """Runs an action between two steps, and raises its error here, because there it would end the engine."""
    errors: list[Exception] = []

    def caught() -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    between_steps(caught)
    if errors:
        raise errors[0]
