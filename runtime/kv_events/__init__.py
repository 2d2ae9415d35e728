"""Tells routers which pages the prefix cache holds: tracks changes, numbers them in batches and publishes them."""
