"""Model directories: finding their files and mapping their tensors to parameters."""
