"""Keeps pages evicted from the devices in host memory, and copies them back when a request needs them."""
