"""Where the test processes keep compiled programs, also from run to run."""

import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "d" / "compiled"  # `pytest --cache-clear` removes it
_MAX_BYTES = 2 << 30  # all tests need 0.1 GB; a change of the model adds as much again


def compiled_programs() -> Path:
    """Returns the folder of the programs for this machine's processors, after removing it if it has grown too large."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    folder = _FOLDER / hashlib.sha256("".join(sorted(features)).encode()).hexdigest()[:16]
    programs = list(folder.glob("xla/*"))
    if sum(program.stat().st_size for program in programs) > _MAX_BYTES:
        for program in programs:
            program.unlink(missing_ok=True)
    return folder
