"""C++ kernels for the CPU, and operators in Python."""
