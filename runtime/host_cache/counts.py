"""What a host tier has done, for metrics and benchmarks."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class HostCacheCounts:
    """Counts since the start, in pages of the KV cache, except for `num_failed`."""

    num_pages: int = 0  # in host memory now
    num_saved: int = 0  # copied to host memory
    num_restored: int = 0  # copied back
    num_resumed: int = 0  # those for requests that had been preempted
    num_lost: int = 0  # evicted without a copy
    num_recomputed: int = 0  # in host memory, but faster to compute again
    num_loaded: int = 0  # read from the files of the last run
    num_failed: int = 0  # copies of blocks that failed, either way
