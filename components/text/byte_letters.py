"""The letters in which byte-level tokenizers write bytes."""


def byte_letters() -> list[str]:
    """Each byte's Latin-1 character if visible, else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
