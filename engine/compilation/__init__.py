"""The model's forward, compiled to a package or recorded as CUDA graphs."""
