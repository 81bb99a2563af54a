"""The engine without its device: requests, limits, outcomes of steps."""
