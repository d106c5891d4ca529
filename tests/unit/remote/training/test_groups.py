"""What a rank knows of its process groups at its end. Two processes of their own, as two ranks are, with gloo."""

import os
import subprocess
import sys
import types

import pytest

from distmagic.remote.training import groups
from tests import REPOSITORY
from tests.builders.later import Later
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S

Later("torch")  # without it this module is skipped

RANK = """
import contextlib, os, sys
from distmagic.remote.training import groups
if {warm}:
    import torch.distributed
groups.install()
print("torch is not imported:", groups.use(), "torch" in sys.modules)
import torch, torch.distributed as dist
from torch.distributed import destroy_process_group
print("torch is imported:", groups.use(), flush=True)
folder = sys.argv[1]
other = os.fork()  # two ranks, for which torch is loaded once
rank = 1 if other == 0 else 0
sys.stdout = open(os.path.join(folder, f"rank {{rank}}"), "w")

def init(name, world=2):
    groups._notes.use = "none"
    store = dist.FileStore(os.path.join(folder, name if world > 1 else name + str(rank)), world)
    dist.init_process_group("gloo", store=store, rank=rank if world > 1 else 0, world_size=world)

def meet(name):  # a group that one rank destroys while the other still connects breaks there
    store = dist.FileStore(os.path.join(folder, name + " met"), 2)
    store.set(str(rank), "here")
    store.wait(["0", "1"])

@contextlib.contextmanager
def told(name, world=2):
    init(name, world)
    yield
    meet(name)
    print(name + ":", groups.use(), end=" ")
    groups._notes.use = "none"
    destroy_process_group()
    print(groups.use())

with told("nothing is done"):
    pass
with told("all_reduce"):
    dist.all_reduce(torch.ones(1))
{kinds}init("two after each other")
dist.all_reduce(torch.ones(1))
meet("first")
dist.destroy_process_group()
store = dist.FileStore(os.path.join(folder, "second"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
meet("second")
print("two after each other:", groups.use())
dist.destroy_process_group()
{last}if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""
KINDS = """\
with told("send"):
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
with told("a group of one"):
    group = dist.new_subgroups(1)[0]
    dist.all_reduce(torch.ones(1), group=group)
with told("a subgroup"):
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
with told("DistributedDataParallel"):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
with told("each alone", world=1):
    dist.all_reduce(torch.ones(1))
"""
LAST = """\
import faulthandler, gc
faulthandler.dump_traceback_later(40, exit=True)

def threads():
    names = [open(f"/proc/self/task/{number}/comm").read().strip() for number in os.listdir("/proc/self/task")]
    return names.count("pt_gloo_runloop")

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    words = dist.FileStore(os.path.join(folder, "words"), 2)
    if rank == 1:
        words.wait(["rank 0 leaves"])
    # Rank 0 lets go of its model while a thread of gloo still holds a tensor.
    dist.all_reduce(torch.ones(1), async_op=rank == 0)
    dist.destroy_process_group()
    if rank == 0:
        words.set("rank 0 leaves", "")

del model, group
gc.collect()
groups.let_go()
init("a model that is let go of")
train()
gc.collect()
print("a model is let go of:", threads() > 0, end=" ")
sys.stdout.flush()
child = os.fork()
if child == 0:  # the threads of the groups are not in it
    groups.let_go()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
groups.let_go()
print(threads())
"""
EXPECTED = """\
nothing is done: unused unused
all_reduce: used used
{kinds}two after each other: used
{last}"""
EXPECTED_KINDS = """\
send: used used
a group of one: unused unused
a subgroup: used used
DistributedDataParallel: used used
each alone: unused unused
"""
# Else the rank would never end: the model waits for a thread of gloo, which waits for the interpreter, which it holds.
EXPECTED_LAST = """\
a model is let go of: True 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_whether_a_rank_was_in_a_process_group_and_used_it_and_ends(
    warm, tmp_path, compiler_forks
):
    """How it is found out differs where torch is imported later. What counts as use does not: it is tried once."""
    program = RANK.format(
        warm=warm, kinds=KINDS if warm else "", last=LAST if warm else ""
    )
    expected = EXPECTED.format(
        kinds=EXPECTED_KINDS if warm else "", last=EXPECTED_LAST if warm else ""
    )
    script = tmp_path / "rank.py"
    script.write_text(program)
    if warm:
        done = compiler_forks.run(script, str(tmp_path))
    else:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path)],
            capture_output=True,
            check=False,
            timeout=HANG_S,
            env=env,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == (
        f"torch is not imported: none {warm}\ntorch is imported: none\n"
    )
    assert (tmp_path / "rank 0").read_text() == expected
    assert (tmp_path / "rank 1").read_text() == expected


ODD = """
import sys, types
from distmagic.remote.training import groups
class Group:
    _device_types = ("xpu",)
    def size(self): return 2
    def _get_backend(self, device): return self
    def _get_sequence_number_for_group(self): raise RuntimeError("does not yet support sequence numbers")
c10d = types.ModuleType("torch.distributed.distributed_c10d")
{world}
sys.modules[c10d.__name__] = c10d
groups.install()
print(groups.use())
"""


@pytest.mark.parametrize(
    "world",
    [
        pytest.param("", id="a torch that keeps its groups elsewhere"),
        pytest.param(
            "c10d._world = types.SimpleNamespace(pg_map={Group(): ()})",
            id="a backend that counts no operations",
        ),
    ],
)
def test_what_can_not_be_known_passes_as_used(world, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = completed([sys.executable, "-c", ODD.format(world=world)], env=env)
    assert done.stdout == "used\n"


KEPT = """
import sys, types
from distmagic.remote.training import groups
class Group:
    _device_types = ("cpu",)
    def __init__(self, backend="gloo"): self.backend = backend
    def size(self): return 1
    def _get_backend(self, device): return self
    def name(self): return self.backend
class DistributedDataParallel:
    def __init__(self, group):
        self.process_group, self.reducer = group, "holds it too, out of sight"
c10d = types.ModuleType("torch.distributed.distributed_c10d")
c10d.destroy_process_group = lambda: None
sys.modules[c10d.__name__] = c10d
sys.modules["torch.nn.parallel.distributed"] = sys.modules[__name__]
groups.install()
def kept_after_the_end_of(*there):
    c10d._world = types.SimpleNamespace(pg_map=dict.fromkeys(there))
    c10d.destroy_process_group()
    c10d.destroy_process_group()
    del c10d._world
    return len(groups._notes.kept)
print("without a model:", kept_after_the_end_of(Group()))
first = DistributedDataParallel(Group())
print("with a model:", kept_after_the_end_of(Group(), first.process_group, Group()))
second = DistributedDataParallel(Group())
print("with another one too:", kept_after_the_end_of(second.process_group))
nccl = DistributedDataParallel(Group("nccl"))
print("not of gloo:", kept_after_the_end_of(nccl.process_group) - 2)
del first
print("whose model is gone:", kept_after_the_end_of() - 1)
groups.let_go()
print("whose model is there:", len(groups._notes.kept))
del second
groups.let_go()
print("at last:", len(groups._notes.kept))
"""


def test_only_groups_that_a_model_holds_are_kept_and_as_long_as_it_lives():
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = completed([sys.executable, "-c", KEPT], env=env)
    assert done.stdout.splitlines() == [
        "without a model: 0",
        "with a model: 1",
        "with another one too: 2",
        "not of gloo: 0",
        "whose model is gone: 0",
        "whose model is there: 1",
        "at last: 0",
    ]


GIVEN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TUTORIAL = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12355"}
HERE, THERE = "gpu-a:29400", "localhost:12355"
# What the program sets, the arguments of `rendezvous`, the URL that torch is given, and where the ranks meet.
MEETINGS = {
    "as it is given": ({}, ("env://",), "env://", HERE),
    "the tutorial's setup": (TUTORIAL, ("env://", 0, 2), "env://", HERE),
    "only a port": ({"MASTER_PORT": "1"}, ("env://",), "env://", HERE),
    "rank and size as variables": ({**TUTORIAL, "RANK": "0", "WORLD_SIZE": "2"}, ("env://",), "env://", HERE),
    "a URL": ({}, ("tcp://127.0.0.1:23456", 0, 2), "env://", HERE),
    "a URL of the run": ({}, ("tcp://gpu-a:29400", 0, 2), "tcp://gpu-a:29400", HERE),
    "a smaller group": (TUTORIAL, ("env://", 0, 1), "env://", THERE),
    "another rank": (TUTORIAL, ("env://", 1, 2), "env://", THERE),
    "another rank as a variable": ({**TUTORIAL, "RANK": "1"}, ("env://",), "env://", THERE),
    "a rank in the URL": (TUTORIAL, ("env://?rank=0&world_size=2",), "env://?rank=0&world_size=2", THERE),
    "a file": (TUTORIAL, ("file:///tmp/x", 0, 2), "file:///tmp/x", THERE),
    "a store of its own": ({**TUTORIAL, "TORCHELASTIC_USE_AGENT_STORE": "False"}, ("env://", 0, 2), "env://", THERE),
}  # fmt: skip
MENDED = {"the tutorial's setup", "only a port", "rank and size as variables", "a URL"}


@pytest.mark.parametrize("name", MEETINGS)
def test_all_ranks_meet_at_the_store_of_their_run(name, monkeypatch, capsys):
    sets, asked, url, place = MEETINGS[name]
    c10d = types.ModuleType(groups._C10D)
    c10d.rendezvous = lambda url, *_: [
        (url, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", 0)
    ]
    for variable, value in GIVEN.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(groups._notes, "given", dict(os.environ))
    groups._patch(c10d)
    for variable, value in sets.items():
        monkeypatch.setenv(variable, value)
    assert next(c10d.rendezvous(*asked)) == (url, place, 0)
    said = capsys.readouterr().err
    assert ("meet at gpu-a:29400" in said) is (name in MENDED)
