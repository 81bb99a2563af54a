"""Sampling: draws token ids from logits."""
