"""The chat-template variables that a client may set."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from components.errors import Rejected

SWITCHES: Final = ("enable_thinking", "thinking")  # names in templates
EFFORT: Final = "reasoning_effort"


def template_variables(
    effort: str | None, given: Mapping[str, Any], mentions: Callable[[str], bool], *, reasons: bool
) -> dict[str, Any]:
    """Variables for the template.

    Args:
        effort: the request's `reasoning_effort`.
        given: its `chat_template_kwargs`.
        mentions: whether the template reads a variable.
        reasons: whether the model reasons.
    Raises: Rejected if the template would ignore one of them.
    """
    variables: dict[str, Any] = {name: _switch(name, value, mentions) for name, value in given.items()}
    if effort is None:
        return variables
    switch = next((name for name in SWITCHES if mentions(name)), None)
    if mentions(EFFORT) and not (effort == "none" and switch):
        variables[EFFORT] = effort
    elif switch:
        if effort not in {"none", "medium"}:
            raise _unsupported("this model's reasoning can only be 'none' or, by default, 'medium'")
        if variables.setdefault(switch, effort != "none") != (effort != "none"):
            raise Rejected(f"'{EFFORT}' contradicts 'chat_template_kwargs'; send one of them.", param=EFFORT)
    elif effort != "none":
        raise _unsupported("this model's reasoning cannot be set: leave it out")
    elif reasons:
        raise _unsupported("this model's reasoning cannot be switched off: leave it out")
    return variables


def _switch(name: str, value: Any, mentions: Callable[[str], bool]) -> bool:
    param = f"chat_template_kwargs.{name[:64]}"
    if name not in SWITCHES or not mentions(name):
        known = [f"'{switch}'" for switch in SWITCHES if mentions(switch)]
        hint = f"of this model's template only {' and '.join(known)} can be set" if known else "leave it out"
        raise Rejected(f"'{param}' is not supported: {hint}.", param=param, code="unsupported_parameter")
    if not isinstance(value, bool):
        raise Rejected(f"'{param}' must be true or false.", param=param, code="invalid_value")
    return value


def _unsupported(hint: str) -> Rejected:
    return Rejected(
        f"'{EFFORT}' has a value that this model does not support: {hint}.", param=EFFORT, code="unsupported_parameter"
    )
