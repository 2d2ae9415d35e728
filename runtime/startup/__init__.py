"""Starts a serving process from a configuration, and changes the TP size of a running one."""
