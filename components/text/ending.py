"""How the prompt of a conversation ends."""

from typing import NamedTuple


class Ending(NamedTuple):
    open_turn: bool = True
    continue_last: bool = False  # continue the last message's text
    add_special_tokens: bool = False  # the model's own, around the template's text


NEXT_TURN = Ending()
