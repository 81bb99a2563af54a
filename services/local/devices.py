"""`--device`: where the workers' engines run, all of them or those of one role."""

from collections.abc import Sequence
from typing import Final

ROLES: Final = ("prefill", "decode")
FORM: Final = "give cpu, cuda or cuda:N for all workers, or prefill=cuda:0,decode=cuda:1"


def device_settings(given: Sequence[str]) -> dict[str, str]:
    """Settings as a `Plan` has them, of options that may be repeated and may each have several parts.

    Raises: ValueError, for a role that has no engine, a role or all named twice, or no device.
    """
    settings: dict[str, str] = {}
    for part in ",".join(given).split(",") if given else []:
        role, equals, device = part.rpartition("=")
        if not device.strip() or (equals and role.strip() not in ROLES):
            raise ValueError(f"{part!r}: {FORM}")
        name = f"{role.strip()}_engine__device" if equals else "engine__device"
        if name in settings:
            raise ValueError(f"{part!r} comes after another device for the same workers: {FORM}")
        settings[name] = device.strip()
    return settings
