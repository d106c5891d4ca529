"""A program that an exported folder starts: it sees what Python shows it, and nothing of gloo outlives it."""

import os
import sys

import pytest

from distmagic.exports.on_nodes import run_rank
from tests.builders.shell import completed

PROGRAM = """
import atexit, multiprocessing, sys
import beside
def double(x):
    return 2 * x
left_open = open("left-open.txt", "w")
left_open.write("all of it")
if __name__ == "__main__":
    atexit.register(lambda: print("at exit", double(1), left_open.closed))
    print(__name__, __file__, sys.argv, sys.path[0], __spec__ is None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [2]))
    if sys.argv[1:] == ["fail"]:
        raise ValueError("no data")
"""


@pytest.mark.parametrize("args", [(), ("a b",), ("fail",), ("-m",)])
def test_a_program_sees_what_python_shows_it_and_ends_as_python_ends_it(tmp_path, args):
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / "beside.py").write_text("")
    (tmp_path / "beside.py").write_text("raise ImportError('of another folder')")
    words = ("inner/train.py", *args)
    where = tmp_path
    if args == ("-m",):
        words, where = ("-m", "train", "x"), folder
    ends = []
    for start in ((run_rank.__file__,), ()):
        done = completed([sys.executable, *start, *words], cwd=where, check=False)
        assert (where / "left-open.txt").read_text() == "all of it"
        last = done.stderr.splitlines()[-1:]
        ends.append((done.returncode, done.stdout.replace(str(tmp_path), ""), last))
    (own_code, own, last), by_python = ends[0], ends[1]
    # Python itself names a script as it was written.
    as_named = by_python[1].replace(" inner/train.py", " /inner/train.py")
    assert (own_code, own, last) == (by_python[0], as_named, by_python[2])


def test_a_program_finds_its_modules_where_python_adds_no_folder_to_its_path(tmp_path):
    (tmp_path / "train.py").write_text("import beside, sys; print(sys.path[0])")
    (tmp_path / "beside.py").write_text("")
    command = [sys.executable, run_rank.__file__, "train.py"]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = completed(command, cwd=tmp_path, env=env, check=False)
    assert (done.stdout, done.stderr) == (f"{tmp_path}\n", "")


GLOO = """
import atexit, gc, os, sys, weakref, torch, torch.distributed as dist
import holder
from torch.nn.parallel import DistributedDataParallel
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
atexit.register(print, "at exit")
def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return weakref.ref(dist.group.WORLD)
def is_held(group):
    return group() is not None and bool(gc.get_referrers(group()))
first = begin()
model = DistributedDataParallel(torch.nn.Linear(1, 1))
dist.destroy_process_group()
del model
gc.collect()
print("held after its model:", is_held(first))
second = begin()
dist.destroy_process_group()
print("held later:", is_held(first), is_held(second))
def train(ends):
    begin()
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(1)).sum().backward()
    if ends:
        dist.destroy_process_group()
    return model
kept = train(True)
train(True)
holder.model = train(False)
holder.file = open("left-open.txt", "w")
holder.file.write("all of it")
sys.exit(7)
"""


@pytest.mark.slow
def test_groups_of_gloo_end_after_their_models_or_never_and_files_are_written(tmp_path):
    """A model is never the last to hold its group; what is left at the end is left alone."""
    (tmp_path / "train.py").write_text(GLOO)
    (tmp_path / "holder.py").write_text("")
    command = [sys.executable, run_rank.__file__, "train.py"]
    done = completed(command, cwd=tmp_path, check=False)
    printed = "held after its model: True\nheld later: False False\nat exit\n"
    assert (done.returncode, done.stdout) == (7, printed), done.stderr
    assert (tmp_path / "left-open.txt").read_text() == "all of it"
