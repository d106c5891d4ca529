"""A script and its arguments behind the flags of a cell."""

import pytest

from distmagic.errors import UsageError
from distmagic.request import flags
from distmagic.request.flags import Program, split_program


@pytest.mark.parametrize(
    ("line", "own", "program"),
    [
        ("train.py", "", Program(target="train.py")),
        ("train.py 50 --lr 0.1 --hosts x", "", Program(target="train.py", args=("50", "--lr", "0.1", "--hosts", "x"))),
        ("--hosts a:2 --detach train.py -x", "--hosts a:2 --detach", Program(target="train.py", args=("-x",))),
        ("--hosts=a:2 -o run t.py", "--hosts=a:2 -o run", Program(target="t.py")),
        ("--nproc_per_node 2 t.py", "--nproc_per_node 2", Program(target="t.py")),
        ("--cold -m pkg.train 1", "--cold", Program(target="pkg.train", args=("1",), is_module=True)),
        ("--cold -- --odd.py -- 1", "--cold", Program(target="--odd.py", args=("--", "1"))),
        ("python_of.py torchrun", "", Program(target="python_of.py", args=("torchrun",))),
        ("accelerate env", "", Program(target="accelerate", args=("env",))),
        ("train.py -- -m x", "", Program(target="train.py", args=("--", "-m", "x"))),
    ],
)  # fmt: skip
def test_what_follows_the_name_of_a_program_is_its_own(line, own, program):
    assert split_program(line.split()) == (tuple(own.split()), program)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--hosts a:2",
        "--hosts",
        "-m",
        "-m pkg/train.py",
        "--hosts a:2 torchrun --nproc-per-node 2 train.py 50",
        "python3 -u -m torch.distributed.run train.py",
        "-m accelerate.commands.launch train.py",
        "/opt/venv/bin/accelerate launch train.py --lr 0.1",
        "python",
        "lightning",
        "lightning run model train.py --lr 0.1",
        "fabric run train.py",
    ],
)
def test_a_program_must_be_named(line, golden):
    with golden.raises(UsageError):
        split_program(line.split())


def test_a_cell_that_is_a_script_has_arguments(golden):
    request = flags.parse_line("--script --cold -- 50 --lr 0.1", flags.Defaults())
    assert (request.script, request.args, request.access.cold) == (
        True,
        ("50", "--lr", "0.1"),
        True,
    )
    with golden.raises(UsageError):
        flags.parse_line("--cold -- 50", flags.Defaults())
