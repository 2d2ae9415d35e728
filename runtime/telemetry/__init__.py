"""Metrics, logs, traces and profiles, and the HTTP port that serves probes and metrics."""
