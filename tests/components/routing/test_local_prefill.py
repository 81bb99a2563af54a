import pytest

from components.routing.policy import PromptLoad, PromptRate, is_sooner_locally

IDLE = PromptLoad(0, 1000.0)


@pytest.mark.parametrize(
    ("here", "there", "sooner"),
    [
        (IDLE, [IDLE], False),
        (IDLE, [PromptLoad(590, 1000.0)], False),  # 0.1 s here, 0.6 there: no more than the margin
        (IDLE, [PromptLoad(610, 1000.0)], True),
        (IDLE, [PromptLoad(1590, 1000.0, age_s=1.0)], False),  # that was a second ago
        (IDLE, [PromptLoad(1610, 1000.0, age_s=1.0)], True),
        (PromptLoad(0, 1000.0), [PromptLoad(10, 1000.0, age_s=60.0)], False),
        (IDLE, [PromptLoad(5000, 1000.0), PromptLoad(50, 1000.0)], False),  # one of them is free soon
        (IDLE, [PromptLoad(5000, 1000.0), PromptLoad(700, 1000.0)], True),
        (PromptLoad(900, 1000.0), [PromptLoad(1400, 1000.0)], False),  # we have a queue, too
        (PromptLoad(0, 100.0), [PromptLoad(1400, 1000.0)], False),  # a second here
        (PromptLoad(0, 0.0), [PromptLoad(700, 1000.0)], True),  # as fast as the other, until we know better
        (IDLE, [PromptLoad(700, 0.0)], True),
        (PromptLoad(0, 0.0), [PromptLoad(500, 0.0)], False),
        (IDLE, [], False),
    ],
)
def test_a_prompt_is_computed_here_when_every_queue_there_lasts_longer(
    here: PromptLoad, there: list[PromptLoad], sooner: bool
) -> None:
    assert is_sooner_locally(100, here, there) is sooner


def test_a_rate_follows_the_steps_that_compute_prompts() -> None:
    rate = PromptRate()
    rate.stepped(0, 0.01)
    assert rate.tokens_per_s == 0
    rate.stepped(256, 0.1)
    assert rate.tokens_per_s == 2560
    rate.stepped(0, 5.0)
    assert rate.tokens_per_s == 2560
    for _ in range(50):
        rate.stepped(100, 0.1)
    assert rate.tokens_per_s == pytest.approx(1000, rel=0.01)
