"""Compiles programs, keeps them on disk between starts, and notices those that are compiled too late."""
