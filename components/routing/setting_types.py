"""Settings of a process that chooses among instances."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field, PositiveInt

from components.routing.policies import POLICIES, parse_policy


def _checked(policy: str) -> str:
    parse_policy(policy)
    return policy


RoutingPolicy = Annotated[str, AfterValidator(_checked)]
ABOUT_POLICIES: Final = f"{', '.join(POLICIES)}; NAME@OPTION=NUMBER,… changes its numbers; docs/routing.md"

KvIndexBlocks = Annotated[
    PositiveInt,
    Field(description="cached blocks of all workers that this process remembers, about 110 bytes each"),
]
