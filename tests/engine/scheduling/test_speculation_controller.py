"""Proposals that help are used, others cost little: by a clock of its own, in plain steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mlxsrv.engine.scheduling.speculation_controller import SpeculationController


def simulate(
    controller: SpeculationController,
    tokens: int,
    *,
    chance: float,
    pass_of: Callable[[int], float],
    proposal: float,
    unread: int = 0,
    reading: float = 0.0,
    seed: int = 0,
) -> float:
    """Seconds that so many tokens take; `chance` is that of a proposal, `pass_of` what the model's
    pass over so many tokens takes."""
    dice = np.random.default_rng(seed)
    seconds, drawn = 0.0, 0
    while drawn < tokens:
        count = 0
        if controller.affords(unread):
            if unread > 16:
                read = min(unread, 64)
                controller.saw_reading(read, reading * read)
                unread -= read
                seconds += reading * read
                continue
            count = controller.choose([tokens])
        if not count:
            taken = pass_of(1) * dice.uniform(0.9, 1.1)
            controller.saw_plain_step(taken)
            drawn += 1
        else:
            accepted = 0
            while accepted < count and dice.random() < chance:
                accepted += 1
            taken = (pass_of(count + 1) + proposal * count) * dice.uniform(0.9, 1.1)
            held_up = 20.0 if dice.random() < 0.02 else 0.0  # something else had the machine
            controller.saw_speculative_step([count], [accepted], 1, taken + held_up)
            drawn += accepted + 1
        seconds += taken
    return seconds


def flat(tokens: int) -> float:
    """A pass of a device that waits for its memory."""
    return 1 + 0.02 * (tokens - 1)


def dear(tokens: int) -> float:
    """A pass over several tokens is another kind of work than one over a single token."""
    return 1.0 if tokens == 1 else 2.2 + 0.15 * tokens


def steep(tokens: int) -> float:
    """A pass of one that does not."""
    return 0.6 + 0.4 * tokens


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pass_of", [flat, steep, dear])
@pytest.mark.parametrize(("chance", "proposal"), [(0.0, 0.1), (0.0, 1.0), (0.9, 1.0), (0.2, 0.3)])
def test_what_does_not_help_costs_little(
    chance: float, proposal: float, pass_of: Callable[[int], float], seed: int
) -> None:
    controller = SpeculationController()
    taken = simulate(controller, 2000, chance=chance, pass_of=pass_of, proposal=proposal, seed=seed)
    assert taken < 2000 / 0.96


def play(
    controller: SpeculationController, rounds: int, second: float = 1.0, proposal: float = 0.1
) -> list[int]:
    """Do so many steps in which all proposals hold. Returns their sizes."""
    sizes: list[int] = []
    for _ in range(rounds):
        assert controller.affords(0)
        sizes.append(controller.choose([100]))
        controller.saw_speculative_step([sizes[-1]], [sizes[-1]], 1, second + proposal * sizes[-1])
    return sizes


def make_timed() -> SpeculationController:
    """A controller that knows what a plain step takes: 1 s."""
    controller = SpeculationController()
    for _ in range(4):
        controller.saw_plain_step(1.0)
    return controller


def test_longer_speculative_steps_are_tried_although_the_first_are_no_faster_than_plain_steps() -> (
    None
):
    controller = make_timed()
    assert play(controller, 5, second=3.0) == [2, 4, 8, 8, 8]
    assert controller.on
    controller.saw_speculative_step([1], [1], 1, 3.1)  # no more was found
    assert controller.choose([100]) == 8


def test_speculative_steps_are_as_long_as_their_times_make_worth_while() -> None:
    """A proposal to each of 4 rows takes as long as a step. Where they hold mostly, a few are best;
    where only one row has any, none are."""
    controller = make_timed()
    dice, sizes = np.random.default_rng(0), []
    for _ in range(60):
        sizes.append(controller.choose([9, 9, 9, 9]))
        if not sizes[-1]:
            controller.saw_plain_step(1.0)
            continue
        held = [min(int(dice.geometric(0.3)) - 1, sizes[-1]) for _ in range(4)]
        taken = 1.2 + 0.25 * sizes[-1]
        controller.saw_speculative_step([sizes[-1]] * 4, held, 4, taken * dice.uniform(0.9, 1.1))
    assert sizes[:2] == [2, 4]
    assert set(sizes[30:]) <= {2, 3, 4}
    assert controller.choose([8, 0, 0, 0]) == 0
    assert controller.choose([2, 2, 2, 2]) == 2


def test_now_and_then_a_speculative_step_has_a_proposal_more_than_is_best() -> None:
    """From steps of one size nobody can tell what others take."""
    controller, sizes = make_timed(), []
    for _ in range(40):
        sizes.append(controller.choose([8, 1, 1, 1]))
        held = [sizes[-1], 1, 1, 1]
        controller.saw_speculative_step(held, held, 4, 1.0 + 0.5 * sizes[-1])
    assert sizes[8:] == [*[1] * 7, 2] * 4


def test_a_proposal_behind_an_input_that_is_guessed_is_worth_less() -> None:
    controller = make_timed()
    play(controller, 20, second=1.2, proposal=0.05)
    assert controller.choose([1], known=False) == 1
    for _ in range(10):
        controller.saw_inputs(0, 1)
    assert controller.choose([1], known=True) == 1
    assert controller.choose([1], known=False) == 0


def test_times_of_speculative_steps_that_promise_too_little_are_forgotten_after_a_while() -> None:
    """They may have been those of a machine that something else had."""
    controller = make_timed()
    assert play(controller, 1, second=4.0) == [2]
    sizes = [controller.choose([2]) for _ in range(65)]
    assert sizes == [0] * 64 + [2]


def test_plain_steps_are_timed_anew_now_and_then() -> None:
    """They get slower with the text, and speculative ones with them, which are no worse for it."""
    controller, second = SpeculationController(), 1.0
    for _ in range(4):
        controller.saw_plain_step(second)
    plain_steps = 0
    for _ in range(400):
        second *= 1.01
        if controller.affords(0):
            count = controller.choose([100])
            controller.saw_speculative_step([count], [count], 1, 2 * second)
        else:
            plain_steps += 1
            controller.saw_plain_step(second)
    assert controller.on
    assert 4 <= plain_steps <= 4 * 400 // 64


def test_trials_that_fail_get_rarer() -> None:
    taken = simulate(SpeculationController(), 20_000, chance=0.0, pass_of=steep, proposal=1.0)
    assert taken < 20_000 / 0.985


def test_reading_long_prompts_for_short_answers_costs_little() -> None:
    controller = SpeculationController()
    rows = [
        simulate(controller, 20, chance=0.9, pass_of=flat, proposal=0.1, unread=2000, reading=0.02)
        for _ in range(100)
    ]
    assert sum(rows) < 2000 / 0.95


def test_reading_prompts_is_paid_by_what_speculation_saves() -> None:
    controller = SpeculationController()
    rows = [
        simulate(controller, 300, chance=0.9, pass_of=flat, proposal=0.1, unread=500, reading=0.02)
        for _ in range(20)
    ]
    assert 6000 / sum(rows) > 1.8


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("chance", "pass_of", "proposal", "speed"),
    [
        (0.9, flat, 0.1, 2.4),
        (0.95, dear, 0.1, 1.4),
        (0.7, flat, 0.1, 1.6),
        (0.95, steep, 0.1, 1.3),
        (0.5, flat, 0.05, 1.3),
    ],
)
def test_what_helps_is_used(
    chance: float, pass_of: Callable[[int], float], proposal: float, speed: float, seed: int
) -> None:
    controller = SpeculationController()
    taken = simulate(controller, 2000, chance=chance, pass_of=pass_of, proposal=proposal, seed=seed)
    assert controller.on
    assert 2000 / taken > speed


@pytest.mark.parametrize("delay", [0.1, 0.5, 1.0])
def test_speculative_steps_that_come_to_nothing_cost_little(delay: float) -> None:
    controller = SpeculationController()
    tokens, seconds = 20_000, 0.0
    for _ in range(tokens):
        if controller.affords(0) and controller.choose([8], known=False):
            controller.saw_inputs(0, 1)
            controller.saw_delay(1.0 + delay)
            seconds += delay
        else:
            controller.saw_plain_step(1.0)
        seconds += 1.0
    assert seconds <= 1.03 * tokens + 16
    assert seconds > tokens, "some were tried"


def test_a_wrong_guess_that_costs_no_time_is_no_loss() -> None:
    controller = make_timed()
    controller.choose([8], known=False)
    for _ in range(200):
        controller.saw_delay(1.0)
    assert controller.on
    assert controller.affords(0)


def test_a_speculative_step_that_fails_ends_speculation_for_a_while() -> None:
    controller = SpeculationController()
    for _ in range(10):
        controller.saw_plain_step(1.0)
    assert controller.affords(0)
    controller.choose([8])
    controller.give_up()
    assert not controller.on
    assert not controller.affords(0)
