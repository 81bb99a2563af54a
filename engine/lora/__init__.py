"""LoRA adapters, applied to the rows of a step."""
