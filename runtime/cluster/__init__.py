"""Several processes in lockstep: membership, the step stream, replay and the watchdog."""
