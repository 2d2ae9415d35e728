"""Quantised weights: how a model declares them, how published files store them, and how they are made."""
