"""The course's exercises: `check("01.1", answer)` prints whether an answer is right, or a hint that leads on.

An answer of None is not answered yet. Solutions, with reasons, are in solutions.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Exercise:
    """One exercise: whether an answer is right, hints for answers that are wrong, and what an answer looks like."""

    is_right: Callable
    # A hint belongs to the first condition that holds. The last one, without a condition, is for all other answers.
    hints: tuple[tuple[Callable, str], ...]
    other: str
    form: str  # what an answer looks like, for one of another kind


def check(number: str, answer: object) -> None:
    """Print whether this answer is right. `number` is that of the exercise: "01.1" is the first of notebook 01."""
    print(f"{number}: {verdict(EXERCISES[number], answer)}")


def verdict(exercise: Exercise, answer: object) -> str:
    """Return "right", or a hint. What an exercise that runs on ranks returned is a dictionary by rank."""
    ranks = answer.values() if isinstance(answer, dict) else [answer]
    if all(one is None for one in ranks):
        return "not answered yet"
    try:
        if exercise.is_right(answer):
            return "right"
        for condition, hint in exercise.hints:
            if condition(answer):
                return f"not yet. {hint}"
    except Exception as error:  # noqa: BLE001 - an answer may be anything, a function that fails too
        return f"not yet. {exercise.form} ({type(error).__name__}: {error})"
    return f"not yet. {exercise.other}"


def equals(wrong: object) -> Callable:
    """Return the condition that an answer is this one."""
    return lambda answer: answer == wrong


def sum_of_ranks(results: dict) -> int:
    """Return 1 + 2 + ... for as many ranks as there are results."""
    return len(results) * (len(results) + 1) // 2


EXERCISES = {
    "00.1": Exercise(
        equals(6),
        (
            (equals(2), "That is the number of hosts. Each runs several ranks."),
            (
                equals(8),
                "The second host has 2 ranks: read the number after its colon.",
            ),
        ),
        "WORLD_SIZE counts the ranks of all hosts together.",
        "Write a number.",
    ),
    "00.2": Exercise(
        lambda sums: set(sums.values()) == {sum_of_ranks(sums)},
        (
            (
                lambda sums: all(sums[rank] == rank + 1 for rank in sums),
                "Each rank returned its own number. dist.all_reduce(number) adds them up, in place.",
            ),
            (
                lambda sums: sums[0] == sum_of_ranks(sums) - len(sums),
                "Rank 0 gives 1, rank 1 gives 2, and so on.",
            ),
        ),
        "Call dist.all_reduce(number) on every rank, then return number.item().",
        "Return a number on each rank.",
    ),
}
