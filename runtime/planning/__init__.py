"""Resolves the options of a server, and computes its memory and speed for machines that need not be present."""
