"""Models: where they come from, how they load, what they support."""
