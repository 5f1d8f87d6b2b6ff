"""Kernels in C++ for CPUs, called through XLA's FFI. Without the compiled library the portable ones serve."""
