"""The course's exercises: `check("01.1", answer)` prints whether an answer is right, or a hint that leads on.

An answer of None is not answered yet. Solutions, with reasons, are in solutions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise


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
    """Return "right", or a hint. What an exercise that runs on ranks returned is a mapping by rank."""
    ranks = answer.values() if isinstance(answer, Mapping) else [answer]
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


def is_close(answer: float, right: float, part: float = 0.02) -> bool:
    """Return whether a number is the right one, give or take its rounding."""
    return abs(answer - right) <= part * abs(right)


def sum_of_ranks(results: dict) -> int:
    """Return 1 + 2 + ... for as many ranks as there are results."""
    return len(results) * (len(results) + 1) // 2


def share_of(ranks: int) -> float:
    """Return the accuracy over so many ranks: 90 of 100 right on the first, 10 of 50 on each other one."""
    others = ranks - 1
    return (90 + 10 * others) / (100 + 50 * others)


def norm_of(count: int) -> float:
    """Return the norm of 0, 1, 2, ..., `count` numbers."""
    return sum(number**2 for number in range(count)) ** 0.5


def parts_of(command: str) -> set[str]:
    """Return the first two words of a command line, each flag with its value, and the last word."""
    words = command.replace("=", " ").split()
    pairs = {f"{one} {other}" for one, other in pairwise(words) if one.startswith("-")}
    return {" ".join(words[:2]), *pairs, *words[-1:]}


def are_seats(seats: list[tuple[int, int, int]]) -> bool:
    """Return whether these are (rank, node, place on the node) of all ranks: each node's places are 0, 1, 2, ..."""
    if [seat[0] for seat in seats] != list(range(len(seats))):
        return False
    nodes = [node for _, node, _ in seats]
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    numbers = list(dict.fromkeys(nodes))
    return [seat[2] for seat in seats] == places and numbers == list(
        range(len(numbers))
    )


def lengths(shares: dict) -> list[int]:
    """Return how many items each rank has."""
    return [len(share) for share in shares.values()]


def is_dealt(shares: dict, items: range) -> bool:
    """Return whether each item is in exactly one share."""
    return sorted(item for share in shares.values() for item in share) == list(items)


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
    "01.1": Exercise(
        equals((1, 1)),
        (
            (
                lambda pair: pair[0] == 5,
                "5 is the global rank. Write the number of its host first, from 0.",
            ),
            (
                equals((2, 0)),
                "The first host has ranks 0 to 3. Which ones has the second?",
            ),
            (equals((1, 2)), "LOCAL_RANK counts from 0 as well."),
        ),
        "Ranks are dealt in the order of the list: 0 to 3 sit on the first host.",
        "Write two numbers: (node rank, local rank).",
    ),
    "01.2": Exercise(
        lambda ranks: set(ranks) == {4, 5, 6, 7},
        (
            (
                lambda ranks: set(ranks) == {5},
                "That is one of them. Look at every rank of the second and third host.",
            ),
            (
                lambda ranks: set(ranks) == {6, 7},
                "The second host has two GPUs as well: numbers 0 and 1.",
            ),
        ),
        "A host with two GPUs has numbers 0 and 1. Which ranks ask it for a larger number?",
        "Write a set of ranks, such as {0, 1}.",
    ),
    "01.3": Exercise(
        lambda seconds: is_close(seconds, 0.32),
        (
            (equals(0.04), "A byte has 8 bits: 400 MB are 3.2 Gbit."),
            (equals(0.4), "Divide by the bandwidth: 10 Gbit a second."),
            (equals(3.2), "Those are the Gbit. Divide by 10 Gbit a second."),
        ),
        "Convert the bytes to bits, then divide by the bandwidth.",
        "Write a number of seconds.",
    ),
    "01.4": Exercise(
        lambda shares: (
            is_dealt(shares, range(13))
            and max(lengths(shares)) - min(lengths(shares)) <= 1
        ),
        (
            (
                lambda shares: sum(lengths(shares)) > 13,
                "Some items belong to several ranks. Begin at another place on each rank: items[rank::...].",
            ),
            (
                lambda shares: is_dealt(shares, range(13)),
                "The slowest rank decides the time: deal the items like cards, one to each rank in turn.",
            ),
        ),
        "Some items belong to no rank.",
        "Return a list of items on each rank.",
    ),
    "02.1": Exercise(
        equals(150),
        (
            (equals(1200), "That is one process. Eight ranks divide the images."),
            (
                equals(7500),
                "Those are the images of a rank. How many batches are they?",
            ),
        ),
        "A step takes 50 images on each of 8 ranks.",
        "Write a number.",
    ),
    "02.2": Exercise(
        lambda rate: is_close(rate, 0.4),
        (
            (
                equals(0.05),
                "With 8 ranks an epoch has an eighth of the steps: make each one longer.",
            ),
            (
                lambda rate: is_close(rate, 0.00625),
                "The other way: fewer steps need a larger rate.",
            ),
        ),
        "The linear scaling rule multiplies the rate by the number of ranks.",
        "Write a number.",
    ),
    "02.3": Exercise(
        lambda part: is_close(part, 100 / 150, 0.01),
        (
            (
                lambda part: is_close(part, 0.55),
                "That is the average of two averages. Add up the counts first.",
            ),
        ),
        "Right answers of both ranks, divided by the images of both.",
        "Write a number between 0 and 1.",
    ),
    "02.4": Exercise(
        equals(4),
        ((equals(12), "That is the sum. DDP divides it by the number of ranks."),),
        "DDP replaces each gradient by the average of all ranks.",
        "Write a number.",
    ),
    "02.5": Exercise(
        lambda parts: all(
            is_close(part, share_of(len(parts)), 0.001) for part in parts.values()
        ),
        (
            (
                lambda parts: is_close(parts[0], 0.9),
                "Each rank returned its own accuracy. Put both numbers into a tensor, and all_reduce it.",
            ),
            (
                lambda parts: is_close(parts[0], 0.55),
                "That is the average of averages. Add up right and count, and divide afterwards.",
            ),
        ),
        "counts = torch.tensor([right, count], device=device) is a good beginning.",
        "Return a number on each rank.",
    ),
    "03.1": Exercise(
        equals(2),
        (
            (equals(16), "The batch is divided, not multiplied."),
            (equals(128), "That would be 16 for each rank. The step has 16 in all."),
        ),
        "Divide the samples of the step by the ranks.",
        "Write a number.",
    ),
    "03.2": Exercise(
        equals(300),
        (
            (equals(0), "The snapshot was loaded: nothing is trained twice."),
            (equals(301), "Steps count from 0: the first 300 are 0 to 299."),
        ),
        "The number of nodes does not matter to the step.",
        "Write a number.",
    ),
    "03.3": Exercise(
        lambda billions: is_close(billions, 2),
        (
            (
                equals(0.5),
                "Those are the parameters. Add the gradients and Adam's two numbers.",
            ),
            (equals(1.5), "Do not forget the gradients."),
        ),
        "Four numbers for each parameter, over 16 ranks.",
        "Write a number, in billions.",
    ),
    "03.4": Exercise(
        lambda words: set(words) == {"write", "get_state_dict"},
        (
            (lambda words: "print" in words, "Printing uses nothing of the model."),
            (
                lambda words: "read" in words,
                "Reading the text uses nothing of the model.",
            ),
            (
                lambda words: len(words) == 1,
                "One more of them uses the model's parameters.",
            ),
        ),
        "With FSDP each rank has a part: look for what uses the whole model.",
        "Write a set of words.",
    ),
    "03.5": Exercise(
        lambda command: (
            {"sky launch", "--num-nodes 8", "task.yaml"} <= parts_of(command)
        ),
        (
            (
                lambda command: "--nodes" in command,
                "SkyPilot's flag has another name: --num-nodes.",
            ),
            (
                lambda command: "task.yaml" in command,
                "The file asks for 2 nodes. A flag of sky launch wins over it.",
            ),
        ),
        "It begins with sky launch and ends with task.yaml.",
        "Write a text in quotation marks.",
    ),
    "03.6": Exercise(
        lambda norms: all(
            is_close(norm, norm_of(3 * len(norms)), 0.001) for norm in norms.values()
        ),
        (
            (
                lambda norms: is_close(norms[0], norm_of(3)),
                "That is the norm of rank 0's part alone. Add up the squares of all ranks first.",
            ),
            (
                lambda norms: is_close(norms[0], norm_of(3 * len(norms)) ** 2),
                "That is the sum of squares. Its square root is the norm.",
            ),
        ),
        "Square, sum, all_reduce, square root, in this order.",
        "Return a number on each rank.",
    ),
    "04.1": Exercise(
        lambda seconds: is_close(seconds, 19.5),
        (
            (
                equals(59.5),
                "Only the steps after the last snapshot are lost. Which step was that?",
            ),
            (
                equals(20),
                "Almost: the snapshot has step 80, and step 119 was the last one done.",
            ),
        ),
        "The snapshots have steps 40, 80, 120. Count the steps after the last one that was written.",
        "Write a number of seconds.",
    ),
    "04.2": Exercise(
        lambda flags: {"--nnodes 2:4", "--max-restarts 3"} <= parts_of(flags),
        (
            (
                lambda flags: ":" not in flags,
                "A number of hosts that may change has two parts: MIN:MAX.",
            ),
            (lambda flags: "4:2" in flags, "The smaller number comes first."),
        ),
        "Each loss uses up one restart: which flag allows three?",
        "Write a text in quotation marks.",
    ),
    "04.3": Exercise(
        equals(1),
        (
            (
                equals(0),
                "Rank 0 waits for somebody, as 2 and 3 do. Who is not with them?",
            ),
        ),
        "The others wait for one rank. Where is it?",
        "Write the number of a rank.",
    ),
    "04.4": Exercise(
        lambda results: set(results.values()) == {sum(90 + rank for rank in results)},
        (
            (
                lambda results: results[0] == 90,
                "That is rank 0's own share. evaluate(device) adds them up.",
            ),
            (
                lambda results: None in results.values(),
                "One rank returns nothing. All of them must call evaluate(device).",
            ),
        ),
        "Call evaluate(device) on every rank, without an if.",
        "Return a number on each rank.",
    ),
    "05.1": Exercise(
        equals(32),
        (
            (
                equals(4),
                "That is the number of Slurm's tasks: one torchrun each. Each starts 8 ranks.",
            ),
            (equals(8), "Those are the ranks of one node."),
        ),
        "Four torchruns with eight ranks each.",
        "Write a number.",
    ),
    "05.2": Exercise(
        equals((1, 5)),
        (
            (
                equals((1, 4)),
                "Almost: both numbers count from 0, and node 1 begins with task 8.",
            ),
            (lambda pair: pair[0] == 2, "SLURM_NODEID counts from 0 as well."),
        ),
        "Tasks 0 to 7 are on node 0.",
        "Write two numbers: (SLURM_NODEID, SLURM_LOCALID).",
    ),
    "05.3": Exercise(
        lambda command: (
            command.replace("=", " ").replace("-N ", "--nodes ").split()
            == ["sbatch", "--nodes", "8", "job.sbatch"]
        ),
        (
            (
                lambda command: "job.sbatch -" in command,
                "What follows job.sbatch are arguments of the script. Options come before it.",
            ),
            (
                lambda command: "8" not in command,
                "The file asks for 2 nodes. An option of sbatch wins over it.",
            ),
        ),
        "sbatch takes the options and then the file.",
        "Write a text in quotation marks.",
    ),
    "05.4": Exercise(
        equals(16),
        ((equals(64), "Those are the cores of the node. Four tasks share them."),),
        "Divide the cores of a node by its tasks.",
        "Write a number.",
    ),
    "05.5": Exercise(
        lambda seats: are_seats([seats[rank] for rank in sorted(seats)]),
        (
            (
                lambda seats: any(
                    isinstance(one, str) for seat in seats.values() for one in seat
                ),
                "Variables are texts: int(os.environ[...]) makes a number.",
            ),
            (
                lambda seats: len({seat[1:] for seat in seats.values()}) < len(seats),
                "Two ranks have the same seat. GROUP_RANK is the number of the node.",
            ),
        ),
        "The first rank sits at (0, 0, 0), and LOCAL_RANK begins with 0 on every node.",
        "Return three numbers on each rank.",
    ),
    "06.1": Exercise(
        equals(24),
        (
            (
                equals(3),
                "That is the number of the task. Count the ranks of the tasks before it.",
            ),
            (
                equals(32),
                "Those are the ranks up to the end of the task. The offset is the first rank of the task.",
            ),
        ),
        "Three tasks with eight ranks each come before it.",
        "Write a number.",
    ),
    "06.2": Exercise(
        equals(32),
        (
            (equals(4), "That is the number of tasks."),
            (equals(24), "The master has ranks, too."),
        ),
        "Four tasks of eight ranks.",
        "Write a number.",
    ),
    "06.3": Exercise(
        lambda task_of: [task_of(rank, 8) for rank in (0, 7, 8, 23)] == [0, 0, 1, 2],
        (
            (
                lambda task_of: task_of(9, 8) == 1 and task_of(7, 8) == 7,
                "% gives the place in the task. Which operator gives the task?",
            ),
        ),
        "Ranks 0 to 7 are in task 0, and 8 is the first of task 1, if the size is 8.",
        "Write a function: lambda rank, size: ...",
    ),
    "06.4": Exercise(
        equals(12),
        ((equals(3), "SING_WORLD_SIZE counts nodes. Each has four ranks."),),
        "Multiply the nodes by the GPUs of a node.",
        "Write a number.",
    ),
    "06.5": Exercise(
        lambda numbers: all(numbers[rank] == rank + 8 for rank in numbers),
        (
            (
                lambda numbers: all(numbers[rank] == rank for rank in numbers),
                "That is the place in the task. Add the offset of worker-1.",
            ),
            (
                lambda numbers: numbers[0] == 16,
                "worker-1 is the second task: the master alone comes before it.",
            ),
        ),
        "Each rank has a number of its own: the offset plus its place.",
        "Return a number on each rank.",
    ),
    "07.1": Exercise(
        lambda lr: lr == 0.1,
        ((equals(0.5), "The ranks have that name themselves: it is theirs."),),
        "One of the two cells has set what the ranks see.",
        "Write a number.",
    ),
    "07.2": Exercise(
        lambda ranks: set(ranks) == {0, 4, 5, 6, 7},
        (
            (lambda ranks: set(ranks) == {0, 4, 7}, "4-7 has ranks between its ends."),
            (lambda ranks: len(ranks) > 5, "Ranks that are not named stay out of it."),
        ),
        "0 and all from 4 to 7.",
        "Write a set of numbers, such as {0, 1}.",
    ),
    "07.3": Exercise(
        lambda counts: all(counts[rank] == 60 * len(counts) for rank in counts),
        (
            (
                lambda counts: counts[0] == 60,
                "That is the number of one rank. Add them up by dist.all_reduce(count).",
            ),
        ),
        "Every rank has the same number: 60 for each rank there is.",
        "Return a number on each rank.",
    ),
}
