"""CUDA C++ kernels for NVIDIA Hopper and the builder that compiles and registers them (`build.load`)."""
