"""Data types and interfaces shared by all packages: requests, options, errors, and the codec of public messages."""
