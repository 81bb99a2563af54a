"""Computes a step on the device."""
