"""Tensor parallelism: one instance on several devices, with a process for each."""
