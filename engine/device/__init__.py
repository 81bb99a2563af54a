"""Tensors in huge pages, and copies between host and device."""
