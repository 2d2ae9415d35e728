"""What do the benchmarks share? Workloads, timing, random arrays, power readings, server processes."""
