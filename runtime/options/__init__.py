"""Which options does a server have?

Every option, and how options are read from flags and TOML files.
"""
