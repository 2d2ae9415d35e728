"""The command line: `meshserve serve`, `generate`, `chat`, `plan`, `demo` and `bench`."""
