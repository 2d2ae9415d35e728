"""Serving with several processes: membership, step stream, replay and watchdog."""
