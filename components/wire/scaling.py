"""planner → services.local, on `<namespace>.local.<id>.<verb>`: change the number of workers by one."""

from typing import Literal

from components.wire.codec import Struct, message


@message("local-count.v1")
class AskCounts(Struct):
    """`.count`; answered by Counts."""


@message("local-scale.v1")
class ScaleRole(Struct):
    """`.scale`: keep `after` workers of a role; answered by the new Counts, or Refused.

    Refused if `before` is not the present number, so that two planners with the same reports change one worker, not
    two.
    """

    role: Literal["prefill", "decode"]
    before: int
    after: int  # one more or one fewer


@message("local-counts.v1")
class Counts(Struct):
    prefill: int
    decode: int
