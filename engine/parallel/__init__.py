"""Tensor parallelism: one instance on several devices, a process each."""
