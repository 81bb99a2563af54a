"""Conversations, whose turns repeat all before them, and users who lead them."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.load.client import Run, chat_body, exchange, open_client
from bench.load.workloads import words


@dataclass(frozen=True, slots=True)
class Turn:
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
    """`count` conversations of `turns` turns that share only `system`.

    Args:
        first_len: extra tokens of the first turn, such as a document.
        turn_len: mean tokens of a turn, uniform between half and one and a half of it.
        output_len: tokens of each answer.
        think_s: mean of the exponential pause before a turn. Without pauses users may fall into step with round
            robin.
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
    """Lead all conversations, `users` at a time.

    A failed turn ends its conversation. Returns: times, and the answers of each conversation.
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
