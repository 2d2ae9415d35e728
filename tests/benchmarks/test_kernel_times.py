"""Tests what is said of a device's timeline."""

from meshserve.benchmarks.lib.kernel_times import idle_text, within


def test_kernels_that_overlap_leave_no_gap_and_short_gaps_are_not_listed():
    spans = [(0, 400_000), (100_000, 500_000), (510_000, 600_000), (700_000, 1_000_000)]
    expected = "of 1.0 ms, 0.1 ms without a kernel; 1 gaps over 50 us, 0.1 ms together"
    assert idle_text(reversed(spans)) == expected


def test_a_single_kernel_has_no_gap():
    assert idle_text([(0, 2e6)]) == "of 2.0 ms, 0.0 ms without a kernel; 0 gaps over 50 us, 0.0 ms together"


def test_a_window_counts_back_from_the_end_of_the_last_kernel():
    spans = [(4e9, 3e9, "last"), (1e9, 0.0, "prefill"), (2e9, 1e9, "first step"), (3e9, 2e9, "second step")]
    assert [name for *_, name in within(spans, (2.0, 1.0))] == ["first step", "second step"]
    assert [name for *_, name in within(spans, (float("inf"), 0.0))] == ["prefill", "first step", "second step", "last"]
