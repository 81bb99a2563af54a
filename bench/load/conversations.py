"""Conversations: each turn is asked behind everything that was said before it, answers too. And those who lead them."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.load.client import Run, chat_body, exchange, open_client
from bench.load.workloads import words


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer is to be."""

    text: str
    output_len: int  # tokens
    think_s: float = 0.0  # after the answer before it


def conversations(
    draw: random.Random,
    count: int,
    turns: int,
    *,
    first_len: int,
    turn_len: int,
    output_len: int,
    think_s: float,
    system: str = "",
) -> list[list[Turn]]:
    """`count` conversations of `turns` turns that have nothing in common but `system`, which the first turn begins with.

    Args:
        draw: makes lengths, words and pauses.
        count: of conversations.
        turns: of each.
        first_len: tokens that the first turn has beside those of any turn, such as a document.
        turn_len: mean tokens of a turn; they are uniform between half and one and a half of it.
        output_len: tokens of each answer.
        think_s: mean of the exponential pause between an answer and the next turn. Without pauses users may fall into
            step with an order in which workers take turns.
        system: text that all share.
    """

    def turn(at: int) -> Turn:
        length = draw.randint(max(1, turn_len // 2), turn_len * 3 // 2)
        if at:
            return Turn(words(draw, length), output_len, draw.expovariate(1 / think_s) if think_s else 0.0)
        return Turn(f"{system} {words(draw, first_len + length)}".lstrip(), output_len)

    return [[turn(at) for at in range(turns)] for _ in range(count)]


async def converse(
    url: str,
    model: str,
    talks: Sequence[Sequence[Turn]],
    users: int,
    done: Callable[[], object] = lambda: None,
) -> tuple[Run, list[list[str]]]:
    """Lead all conversations, `users` at a time: a user takes the next one when the last is over.

    A conversation ends with a turn that fails. Returns: times, and the answers of each conversation.
    """
    run = Run()
    answers: list[list[str]] = [[] for _ in talks]
    pending = iter(range(len(talks)))

    async with open_client(url) as client:

        async def lead(talk: Sequence[Turn], heard: list[str]) -> None:
            messages: list[dict[str, str]] = []
            for turn in talk:
                await asyncio.sleep(turn.think_s)
                messages.append({"role": "user", "content": turn.text})
                answer = await exchange(client, chat_body(messages, turn.output_len, model), run)
                done()
                if answer is None:
                    return
                heard.append(answer)
                messages.append({"role": "assistant", "content": answer})

        async def user() -> None:
            for at in pending:
                await lead(talks[at], answers[at])

        started = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        run.duration_s = time.perf_counter() - started
    return run, answers
