"""What recording a profile refuses; `tests/test_operations.py` records one."""

import pytest

from meshserve.runtime.api.errors import UnavailableFeatureError
from meshserve.runtime.telemetry.profiler import Profiler


def test_a_folder_that_cannot_be_is_refused_by_name_and_nothing_is_recorded(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = Profiler(tmp_path / "file")
    for _ in range(2):  # the first left nothing behind
        with pytest.raises(
            UnavailableFeatureError,
            match=r"cannot create a folder for the profile in .*file: Not a directory\. Restart with",
        ):
            profiler.start()
    with pytest.raises(UnavailableFeatureError, match="no profile is being recorded"):
        profiler.stop()
