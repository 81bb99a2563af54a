"""How the prompt that is made of a conversation ends."""

from typing import NamedTuple


class Ending(NamedTuple):
    """By default it is open for the assistant's next turn."""

    open_turn: bool = True
    continue_last: bool = False  # it ends with the last message's text, which is to go on
    add_special_tokens: bool = False  # those that the model wants around a text, beside what the template writes


NEXT_TURN = Ending()
