"""LoRA adapters: read from PEFT's files, applied to the rows of a step that ask for them."""
