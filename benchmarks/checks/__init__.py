"""Long-running checks: compiled programs, plans, clusters and soak runs."""
