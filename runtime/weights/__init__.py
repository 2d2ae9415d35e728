"""Model directories: where their files are, and how their tensors become parameters."""
