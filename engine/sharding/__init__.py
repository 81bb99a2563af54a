"""A rank's part of a model, and the sums over all ranks."""
