"""CUDA C++ kernels for NVIDIA Hopper GPUs, and the builder that compiles and registers them (`build.load`)."""
