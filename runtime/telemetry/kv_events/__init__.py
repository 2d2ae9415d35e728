"""Which pages does the prefix cache hold now?

Numbers its changes in batches and publishes them for routers.
"""
