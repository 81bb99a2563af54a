"""planner → services.local: how many workers it keeps, and one more or one fewer. On `<namespace>.local.<id>.<verb>`."""

from typing import Literal

from components.wire.codec import Struct, message


@message("local-count.v1")
class AskCounts(Struct):
    """`.count`; answered by Counts."""


@message("local-scale.v1")
class ScaleRole(Struct):
    """`.scale`: keep `after` workers of a role; answered by Counts as they are then, or Refused.

    Refused where `before` is not what is kept, so that two who plan from the same news change one worker, not two.
    """

    role: Literal["prefill", "decode"]
    before: int
    after: int  # one more or one fewer


@message("local-counts.v1")
class Counts(Struct):
    """services.local → caller: workers that it keeps running; one that drains is none of them any more."""

    prefill: int
    decode: int
