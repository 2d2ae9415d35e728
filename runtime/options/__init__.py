"""The options of a server, and how they are read from flags and TOML files."""
