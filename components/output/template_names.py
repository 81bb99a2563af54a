"""The variables that a chat template reads."""

import re
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError, meta

WORD = re.compile(r"[A-Za-z_]\w*")


@lru_cache
def variables_of(template: str) -> frozenset[str]:
    """All words of a template that Jinja cannot parse, e.g. with `{% generation %}`."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  # nothing is rendered
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError:
        return frozenset(WORD.findall(template))
