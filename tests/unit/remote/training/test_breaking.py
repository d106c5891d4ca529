"""Calls that wait for ranks which never come: broken, and the groups made anew. Real processes, with gloo."""

import os
import socket

import pytest

from distmagic.remote.training import group_sockets
from tests.builders import gloo_ranks

# The main thread is interrupted, which leaves no call, and then all groups are broken.
BROKEN = """
def broken(act, is_waiting, before_that=lambda: None):
    def breaks():
        while not is_waiting():
            time.sleep(0.001)
        signal.pthread_kill(main_thread, signal.SIGINT)
        before_that()
        groups.break_all()
    thread = in_a_thread(breaks)
    try:
        try:
            act()
        finally:
            thread.join()
    except KeyboardInterrupt:
        print("interrupted")
"""

# Three ranks wait for each other: two in an all_reduce, the third for a message.
DEADLOCK = """
numbers = lambda: dict(groups._numbers())
def deadlocked(act):
    # The others' calls are under way, too: nobody is broken before.
    before = numbers()
    all_wait = lambda: Words().meet(f"all wait {groups._notes.cell}")
    broken(act, lambda: numbers() != before, all_wait)

groups.begin_cell(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
value = torch.ones(4)
deadlocked(lambda: dist.recv(value, 0) if rank == 2 else dist.all_reduce(value))
words.meet("first")

groups.begin_cell(2)
groups.make_anew()
value = torch.ones(4)
dist.all_reduce(value)
print(value[0].item(), groups.holders(globals()))
dist.init_process_group("gloo")  # as the first cell did, run again
part = dist.new_group([0, 1, 2])
dist.all_reduce(value, group=part)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(4)).sum().backward()
words.meet("second")
deadlocked(lambda: dist.barrier(part) if rank == 2 else model(torch.ones(4)).sum().backward())
words.meet("third")

groups.begin_cell(3)
dist.init_process_group("gloo")  # of a broken group, without a word
value = torch.ones(4)
dist.all_reduce(value)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
print(value[0].item(), groups.holders(globals()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_deadlock_is_broken_in_all_ranks_and_their_group_made_anew(
    compiler_forks, tmp_path
):
    seen = gloo_ranks.run(compiler_forks, tmp_path, 3, BROKEN + DEADLOCK)
    held = "'model (DistributedDataParallel)',"
    both = f"{held} 'part (ProcessGroup)'"
    assert (
        seen == [["interrupted", f"3.0 ({held})", "interrupted", f"3.0 ({both})"]] * 3
    )


# Rank 2 leaves before; the others wait for it at the store, or in a group of theirs that it has not made.
NOBODY_COMES = """
is_making = lambda: groups._notes.making is not None

groups.begin_cell(1)
if rank != 2:
    broken(lambda: dist.init_process_group("gloo"), is_making)
words.meet("first")
groups.begin_cell(2)
if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("gloo")
words.meet("made")  # a rank that breaks its connections could fail one that still makes them
if rank != 2:
    broken(lambda: dist.new_group([0, 1, 2]), is_making)
words.meet("second")
groups.begin_cell(3)
groups.make_anew()
value = torch.ones(4)
dist.all_reduce(value)
print(value[0].item())
dist.destroy_process_group()
"""


def test_ranks_that_wait_for_another_one_to_make_the_group_are_let_go(
    torch_forks, tmp_path
):
    seen = gloo_ranks.run(torch_forks, tmp_path, 3, BROKEN + NOBODY_COMES)
    waited = ["interrupted", "interrupted", "3.0"]
    assert seen == [waited, waited, ["3.0"]]


AT_DIFFERENT_TIMES = """
for number in range(9):
    if {in_cells}:
        groups.begin_cell(number + 1)
    if rank != number % WORLD:
        words.hear(f"first {{number}}")
    words.say(f"first {{number}}")
    dist.init_process_group("gloo")
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value[0] == WORLD
    dist.destroy_process_group()
print("all")
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_cells", [False, True], ids=["in one run", "in cells"])
def test_a_group_is_made_again_in_one_job_when_ranks_come_at_different_times(
    in_cells, torch_forks, tmp_path
):
    program = AT_DIFFERENT_TIMES.format(in_cells=in_cells)
    assert gloo_ranks.run(torch_forks, tmp_path, 3, program) == [["all"]] * 3


CALLS = """
groups.begin_cell(1)
dist.init_process_group("gloo")
part = dist.new_group([0, 1])
value = torch.ones(4)
dist.all_reduce(value)
dist.monitored_barrier()
if rank == 0:
    dist.send(value, 1)
elif rank == 1:
    dist.recv(value, 0)
if rank < 2:
    dist.barrier(part)
if rank == 0:
    left = dist.broadcast(value, 0, async_op=True)
for one in groups.calls():
    print(one.name, one.size, one.calls, one.last)
words.meet("end")
os._exit(0)
"""


def test_a_rank_that_has_made_a_call_more_is_seen_and_what_ranks_do_alone_is_not(
    torch_forks, tmp_path
):
    seen = gloo_ranks.run(torch_forks, tmp_path, 3, CALLS)
    assert seen == [
        ["0 3 2 broadcast", "1 2 1 barrier"],
        ["0 3 1 all_reduce", "1 2 1 barrier"],
        ["0 3 1 all_reduce"],
    ]


def test_what_connections_move_is_counted_as_long_as_they_are_the_same():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        own = {ours.fileno(): os.readlink(f"/proc/self/fd/{ours.fileno()}")}
        before = group_sockets.moved_bytes(own)
        theirs.sendall(bytes(5000))
        ours.recv(5000, socket.MSG_WAITALL)
        assert group_sockets.moved_bytes(own) == before + 5000
        assert group_sockets.moved_bytes({ours.fileno(): "socket:[1]"}) == 0
        group_sockets.shut(own)
        assert ours.recv(1) == b""
