"""What can an operator see of a running server?

Metrics, logs, traces, profiles and cache events, and the HTTP port that serves probes and metrics.
"""
