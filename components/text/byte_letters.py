"""The letters in which byte-level tokenizers write bytes: visible, and one for each."""


def byte_letters() -> list[str]:
    """The letter of each byte: its Latin-1 character where that is visible, else the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
