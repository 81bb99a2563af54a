"""Ages for people to read."""


def age(seconds: float) -> str:
    """`35 s`, `12 min`, `3 h` or `4 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
