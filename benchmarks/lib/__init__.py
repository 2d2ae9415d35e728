"""What the benchmarks share: workloads, timing, power readings."""
