"""What two ranks of gloo leave of their calls when they part: in a call that fails, that aborts a rank, or that waits."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from distmagic.failures.calls import Parting, parting
from distmagic.remote.rank import calls
from distmagic.remote.wire.codec import decode
from distmagic.remote.wire.parts import GroupCalls
from tests.builders.forks import Forks

# Two ranks make one call together, and part; so does each pair of acts. If they wait they are asked.
RANKS = """
import contextlib, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from distmagic.remote.rank import calls
from distmagic.remote.wire.events import LEFT

folder = Path(sys.argv[1])
torch.set_num_threads(1)

def act(words, rank):
    name, size = words.split()
    x, both = torch.ones(int(size)), torch.ones(2 * int(size))
    halves = list(both.chunk(2))
    group = dist.new_group([0, 1], group_desc="inner")
    dist.barrier()
    if name == "broadcast":
        dist.broadcast(x, 0)
    elif name == "all_reduce":
        dist.all_reduce(x)
    elif name == "async":
        torch.optim.SGD([x], lr=1.0)  # training has one, and then torch returns the stacks of calls
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    elif name == "in_group":
        dist.all_reduce(x, group=group)
    elif name == "barrier":
        dist.barrier()
    elif name == "reduce":
        dist.reduce(x, 0)
    elif name == "all_gather":
        dist.all_gather(halves, x)
    elif name == "gather":
        dist.gather(x, halves if rank == 0 else None)
    elif name == "scatter":
        dist.scatter(x, halves if rank == 0 else None)
    elif name == "reduce_scatter":
        dist.reduce_scatter(x, halves)
    elif name == "all_to_all":
        dist.all_to_all_single(both, both.clone())

def be(rank, port, words):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    calls.answer(folder, dist.distributed_c10d)
    try:
        dist.init_process_group("gloo")
        act(words, rank)
    except Exception as error:
        calls.leave(error)
        os._exit(1)
    calls.leave()
    os._exit(0)

def how_it_is(pid):
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        reply = calls.reply_of(folder, pid)
        groups = reply[0].calls if reply else ()
        if any(not one.is_over and (one.number > 1 or group.name) for group in groups for one in group.calls):
            return "waits"
        with contextlib.suppress(OSError), (folder / f"calls-{pid}").open("r+b") as file:
            line = file.readline()
            if line and LEFT.encode() not in line:  # it is no request yet, and not the last word
                file.truncate(0)
        time.sleep(0.01)

def how_it_ends(pid):
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

how = how_it_is if sys.argv[2] == "wait" else how_it_ends
for pair in zip(sys.argv[3::2], sys.argv[4::2]):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = []
    for rank, words in enumerate(pair):
        pid = os.fork()
        if pid == 0:
            be(rank, store.port, words)
        pids.append(pid)
    ends = [*map(how, pids)]
    for pid, end in zip(pids, ends):
        if end == "waits":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(*ends)
    for pid in pids:
        print((folder / f"calls-{pid}").read_bytes().partition(b"\\n")[0].decode())
"""


def all_parted(
    torch_forks: Forks, tmp_path, how: str, *acts: str
) -> list[tuple[list[str], Parting | None]]:
    """Return of each pair of acts how its two ranks ended, or that they wait, and where they part."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = torch_forks.run(script, str(tmp_path), how, *acts)
    assert done.returncode == 0, done.stderr.decode()
    lines = iter(done.stdout.decode().splitlines())
    found = []
    for ends in lines:
        answers = [decode(next(lines).encode())[1] for _ in range(2)]
        found.append((ends.split(), parting(answers)))
    return found


def parted(
    torch_forks: Forks, tmp_path, how: str, *acts: str
) -> tuple[list[str], Parting | None]:
    """Return how two ranks ended, or that they wait, and where they part."""
    (found,) = all_parted(torch_forks, tmp_path, how, *acts)
    return found


SIZES = [
    ("all_reduce 4", "all_reduce 8"),
    ("all_reduce 8", "all_reduce 4"),
    ("broadcast 8", "broadcast 4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("acts", SIZES)
def test_sizes_that_differ_are_left_with_the_calls(torch_forks, tmp_path, acts):
    """A rank that expects less is aborted; the other one loses it, or has sent all and goes on."""
    ends, one = parted(torch_forks, tmp_path, "end", *acts)
    assert "-6" in ends
    assert one is not None
    assert (one.kind, one.number, one.group) == ("different", 2, "the default group")
    made = {side.ranks: side.call for side in one.sides}
    for rank, act in enumerate(acts):
        name, size = act.split()
        assert made[rank,] == f"{name} [{size}]"


@pytest.mark.slow
def test_a_rank_that_left_early_is_known_by_its_last_call(torch_forks, tmp_path):
    ends, one = parted(torch_forks, tmp_path, "end", "all_reduce 4", "nothing 4")
    assert ends == ["1", "0"]
    assert one is not None
    assert (one.kind, one.number, one.missing) == ("behind", 2, (1,))


NAMES = ("all_reduce", "broadcast", "barrier", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mine", NAMES)
def test_every_pair_of_calls_that_differ_is_told(torch_forks, tmp_path, mine):
    """Gloo lets some wait, aborts others, and lets some even succeed. Its reduce_scatter is an all_reduce for each rank."""
    others = [name for name in NAMES if name != mine]
    acts = [f"{name} 4" for other in others for name in (mine, other)]
    found = all_parted(torch_forks, tmp_path, "wait", *acts)
    told = {}
    for other, (_, one) in zip(others, found, strict=True):
        assert one is not None, other
        told[other] = (one.kind, one.number, [side.ranks for side in one.sides])
    wanted = dict.fromkeys(others, ("different", 2, [(0,), (1,)]))
    if mine == "all_reduce":
        wanted["reduce_scatter"] = ("behind", 3, [(1,)])
    if mine == "reduce_scatter":
        wanted["all_reduce"] = ("behind", 3, [(0,)])
    assert told == wanted


def test_a_call_that_waits_later_has_the_line_that_made_it(torch_forks, tmp_path):
    """NCCL's return before they are over, and gloo's do with async_op: the stack shows another line."""
    ends, one = parted(torch_forks, tmp_path, "wait", "async 4", "broadcast 4")
    assert ends == ["waits", "waits"]
    assert one is not None
    places = {side.call: side.place(side.ranks) for side in one.sides}
    lines = RANKS.splitlines()
    (line,) = [i for i, text in enumerate(lines, 1) if "async_op" in text]
    assert places == {
        "all_reduce [4]": f"{tmp_path / 'ranks.py'}, line {line}",
        "broadcast [4]": "",
    }


def test_a_call_in_another_group_is_none_in_this_one(torch_forks, tmp_path):
    _, one = parted(torch_forks, tmp_path, "wait", "all_reduce 4", "in_group 4")
    assert one is not None
    assert (one.kind, one.number, one.missing) == ("behind", 2, (1,))


@pytest.mark.parametrize(
    ("world", "made", "thread", "waits_for"),
    [
        (3, 4, "main", [0]),
        (3, 5, "main", None),
        (2, 4, "main", None),
        (3, -1, "main", None),
        (3, None, "main", [0]),
        (3, None, "saves", None),
        (3, None, "of autograd", [0]),
        (3, None, "unknown", [0]),
    ],
    ids=[
        "a call less",
        "as many calls",
        "a world of two with its own numbers",
        "ended its group",
        "not in the cell",
        "a thread that saves",
        "a thread of autograd",
        "a torch that records no thread",
    ],
)
def test_a_rank_waits_for_those_that_have_made_a_call_less(
    world, made, thread, waits_for, monkeypatch
):
    main = threading.main_thread()
    ids = {"main": str(main.ident), "saves": "7", "of autograd": "8"}
    saves = SimpleNamespace(ident=7, name="Thread-1")
    of_autograd = SimpleNamespace(ident=8, name="Dummy-2")
    monkeypatch.setattr(threading, "enumerate", lambda: [main, saves, of_autograd])
    group = object()
    c10d = SimpleNamespace(
        _world=SimpleNamespace(
            pg_names={group: "0"}, pg_group_ranks={group: dict.fromkeys(range(world))}
        ),
        get_world_size=lambda: world,
    )
    entry = {
        "time_created_ns": 7, "process_group": ("0", "default_pg"), "is_p2p": False, "retired": False,
        "state": "scheduled", "profiling_name": "gloo:all_reduce",
        **({"thread_id": ids[thread]} if thread in ids else {}),
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    monkeypatch.setattr(calls, "recorded", lambda: [entry])
    monkeypatch.setattr(calls, "is_of_all", lambda size: size == 3)
    own = GroupCalls(name="0", size=world, calls=5)
    monkeypatch.setattr(calls, "group_calls", lambda: [own])
    groups = [GroupCalls(name="0", size=world, calls=made or 0)] if made != -1 else []
    absent = {0: None if made is None else groups}
    wanted = waits_for and ("all_reduce", 7, waits_for)
    assert calls.waiting(absent, 6) == wanted
    assert calls.waiting(absent, 8) is None, "the call of an earlier cell"
