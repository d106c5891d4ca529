"""The course's notebooks as they are written: what each opens and ends with, and hints for wrong answers."""

from __future__ import annotations

import re
from types import MappingProxyType

import nbformat
import pytest

from tests import prose
from tests.builders.course import COURSE, NOTEBOOKS, exercises, solutions, tagged

# Those that follow the rules below.
NAMES = {
    "00_quickstart",
    "01_ranks_and_rendezvous",
    "02_mnist_ddp",
    "03_mingpt_ddp",
    "04_survive_failures",
    "05_slurm",
    "06_osmo",
    "07_explore",
}
REWRITTEN = [path for path in NOTEBOOKS if path.stem in NAMES]
each_notebook = pytest.mark.parametrize("path", REWRITTEN, ids=lambda path: path.stem)
WRONG = {
    "00.1": [2, 8, 7],
    "00.2": [{0: 1, 1: 2}, {0: 1, 1: 1}, {0: 3, 1: 4}, {0: "3", 1: None}],
    "01.1": [(5, 1), (2, 0), (1, 2), (0, 0), 5],
    "01.2": [{5}, {6, 7}, {0}, 5],
    "01.3": [0.04, 0.4, 3.2, 1, "fast"],
    "01.4": [
        {0: list(range(13)), 1: list(range(13))},
        {0: list(range(12)), 1: [12]},
        {0: [0, 1], 1: [2, 3]},
        {0: 1, 1: 2},
    ],
    "02.1": [1200, 7500, 1, "many"],
    "02.2": [0.05, 0.00625, 1, "high"],
    "02.3": [0.55, 0.9, 1, "good"],
    "02.4": [12, 1, 2, "all"],
    "02.5": [{0: 0.9, 1: 0.2}, {0: 0.55, 1: 0.55}, {0: 1, 1: 1}, {0: "a", 1: 1}],
    "03.1": [16, 128, 4],
    "03.2": [0, 301, 5],
    "03.3": [0.5, 1.5, 8, "few"],
    "03.4": [
        {"print", "write"},
        {"write"},
        {"read", "write", "get_state_dict"},
        set(),
        1,
    ],
    "03.5": ["sky launch task.yaml", "sky launch --nodes 8 task.yaml", "sky", 8],
    "03.6": [{0: 5**0.5, 1: 50**0.5}, {0: 55.0, 1: 55.0}, {0: 15.0, 1: 15.0}, {0: "a"}],
    "04.1": [59.5, 20, 0.5, "some"],
    "04.2": [
        "--nnodes 4 --max-restarts 3",
        "--nnodes 4:2 --max-restarts 3",
        "--nnodes 2:4",
        3,
    ],
    "04.3": [0, 2],
    "04.4": [{0: 90, 1: 91}, {0: 181, 1: None}, {0: 0, 1: 0}, {0: "a"}],
    "05.1": [4, 8, 5, "all"],
    "05.2": [(1, 4), (2, 5), (0, 13), 13],
    "05.3": [
        "sbatch job.sbatch --nodes 8",
        "sbatch job.sbatch",
        "srun --nodes 8 job.sbatch",
        8,
    ],
    "05.4": [64, 4, 1],
    "05.5": [
        {0: ("0", "0", "0"), 1: ("1", "1", "0")},
        {0: (0, 0, 0), 1: (1, 0, 0)},
        {0: (0, 0, 1), 1: (1, 1, 1)},
        {0: 0, 1: 1},
    ],
    "06.1": [3, 32, 8],
    "06.2": [4, 24, 8],
    "06.3": [lambda rank, size: rank % size, lambda rank, size: size, 3],
    "06.4": [3, 7, 4],
    "06.5": [{0: 0, 1: 1}, {0: 16, 1: 17}, {0: 8, 1: 8}, {0: "a"}],
    "07.1": [0.5, 1, "small"],
    "07.2": [{0, 4, 7}, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 4}, 5],
    "07.3": [{0: 60, 1: 60}, {0: 240, 1: 60}, {0: "a", 1: 1}],
}


def texts(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def codes(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_a_notebook_opens_with_outcome_needs_and_time(path):
    opening = texts(nbformat.read(path, 4))[0]
    assert opening.startswith("# ")
    assert "**After this notebook** you can " in opening
    assert "**You need** " in opening
    assert re.search(r"\*\*Time\*\*: \d+ minutes", opening)
    assert "DISTMAGIC_HOSTS" in opening or "no host" in opening


@each_notebook
def test_a_notebook_ends_with_the_next_one(path):
    ending = texts(nbformat.read(path, 4))[-1]
    assert "**Further reading**: " in ending
    found = re.findall(r"\*\*Next\*\*: \[(\S+)\]\((\S+)\)", ending)
    after = NOTEBOOKS[NOTEBOOKS.index(path) + 1 :]
    assert found == [(one.name, one.name) for one in after[:1]]


@each_notebook
def test_links_of_a_notebook_lead_to_files(path):
    for text in texts(nbformat.read(path, 4)):
        for target in re.findall(r"\]\((?!http|#)([^)\s]+)\)", text):
            assert (COURSE / target).exists(), target


@each_notebook
def test_code_fits_on_a_page_and_drawings_are_folded(path):
    notebook = nbformat.read(path, 4)
    for source in codes(notebook):
        assert max(map(len, source.splitlines())) <= 90
    for cell in notebook.cells:
        if "FancyBboxPatch" in cell.source:
            assert cell.metadata.jupyter.source_hidden
            assert "hide-input" in cell.metadata.tags


@each_notebook
def test_a_notebook_is_written_as_all_pages_are(path):
    assert list(prose.faults("\n\n".join(texts(nbformat.read(path, 4))))) == []


@each_notebook
def test_something_is_broken_on_purpose(path):
    assert "## Broken on purpose" in re.sub(
        r"## \d+\. ", "## ", "\n".join(texts(nbformat.read(path, 4)))
    )


@each_notebook
def test_every_exercise_has_hints_and_a_solution(path):
    notebook = nbformat.read(path, 4)
    (checks,) = tagged(notebook, "check")
    asked = re.findall(r'check\("(\d\d\.\d)", ', checks.source)
    number = path.stem[:2]
    assert asked == [one for one in exercises().EXERCISES if one.startswith(number)]
    assert [one for one in WRONG if one.startswith(number)] == asked
    assert len(solutions(path.stem)) == len(asked)
    on_ranks = [
        cell for cell in tagged(notebook, "exercise") if cell.source.startswith("%%")
    ]
    assert len(on_ranks) == 1


@each_notebook
def test_the_solutions_are_right(path):
    """Those that run on the ranks are checked where the notebook is executed."""
    course, names = exercises(), {}
    for block in solutions(path.stem):
        if not block.startswith("%%"):
            exec(block, names)
    (checks,) = tagged(nbformat.read(path, 4), "check")
    answers = re.findall(r'check\("(\d\d\.\d)", (\w+)\)', checks.source)
    assert answers
    for number, name in answers:
        assert course.verdict(course.EXERCISES[number], names[name]) == "right"


@pytest.mark.parametrize("number", WRONG)
def test_a_wrong_answer_gets_a_hint(number, golden):
    course = exercises()
    exercise = course.EXERCISES[number]
    assert course.verdict(exercise, None) == "not answered yet"
    by_rank = MappingProxyType({0: None, 1: None})  # as `run.results`, no dictionary
    assert course.verdict(exercise, by_rank) == "not answered yet"
    hints = [course.verdict(exercise, answer) for answer in WRONG[number]]
    written = {hint for _, hint in exercise.hints} | {exercise.other}
    assert written <= {hint.removeprefix("not yet. ") for hint in hints}
    golden("\n".join(hints))
