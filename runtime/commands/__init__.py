"""The `meshserve` command line and the implementations of its commands."""
