"""CUDA C++ kernels for NVIDIA GPUs, and the builder that compiles and registers them (`build.load`)."""
