"""What /proc says about the server and the processes in which constraints run."""

import contextlib
import re
from pathlib import Path


class Process:
    """A server process."""

    def __init__(self, process_id: int):
        self.process_id = process_id

    def counts(self) -> dict[str, int]:
        """Returns the numbers of what an attack could leave behind."""
        templates, workers = worker_processes(self.process_id)
        proc = Path(f"/proc/{self.process_id}")
        return {
            "templates": len(templates),
            "workers": len(workers),
            "busy workers": sum(_state(each) not in "SZ" for each in workers),
            "threads": len(list((proc / "task").iterdir())),
            "descriptors": len(list((proc / "fd").iterdir())),
        }

    def memory_bytes(self) -> tuple[int, int]:
        """Returns the memory of the server, and that of its workers; what they share counts once."""
        templates, workers = worker_processes(self.process_id)
        return _pss_bytes(self.process_id), sum(map(_pss_bytes, [*templates, *workers]))

    def reset_peak(self) -> None:
        """Has `peak_bytes` begin again."""
        Path(f"/proc/{self.process_id}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Returns the most memory that the server has had at a time."""
        text = Path(f"/proc/{self.process_id}/status").read_text()
        [kib] = [int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:")]
        return kib * 1024


def worker_processes(server: int) -> tuple[list[int], list[int]]:
    """Returns the processes from which the workers of constraints are forked (one, normally), and the workers."""
    started = [child for child in _children(server) if b"constraint_worker" in _command(child)]
    return started, [worker for template in started for worker in _children(template)]


def is_busy(process_id: int) -> bool:
    """Returns whether a process has used a second of processor time."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, stat[11:13])) > 100
    return False


def _children(process_id: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


def _command(process_id: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    return b""


def _state(process_id: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _pss_bytes(process_id: int) -> int:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
        if (found := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)) is not None:
            return int(found[1]) * 1024
    return 0
