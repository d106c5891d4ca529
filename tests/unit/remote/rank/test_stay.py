"""Cells of ranks that stay, interrupted: three real ranks with gloo, and the requests that their agents would hand on."""

import types
from typing import Any, cast

import pytest

from distmagic.remote.rank import stay
from distmagic.remote.wire import protocol as p
from tests.builders import gloo_ranks

# Rank 0 sends the requests that a notebook would, to the agents of all; each agent is a thread beside its rank.
RANKS = """
import base64, pathlib, socket, types
from distmagic.payload.pack import dumped
from distmagic.remote.rank import report, sources, stay
from distmagic.remote.values.call import Cell
from distmagic.remote.values.seen import Seen
from distmagic.remote.wire import codec, protocol as p
from distmagic.staying import out_of_step, stopping

ALL = tuple(range(WORLD))
main = types.ModuleType("__main__")
main.__builtins__ = __builtins__
sys.modules["__main__"] = main
ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
folder = pathlib.Path(sys.argv[1], f"files of {rank}")
folder.mkdir()
of_rank = types.SimpleNamespace(
    rank=rank, restart=0, folder=folder, call=folder / "call", code=None, paths=(), work_dir="",
)
sources.form_of_results = lambda code: None
report.begin = lambda send, rank, restart: None

def agent():
    talk = Words()
    number = 0
    while True:
        request = talk.hear(f"request {number}/{rank}")
        number += 1
        if request == "end":
            agents.shutdown(socket.SHUT_RDWR)
            return
        agents.send(request.encode())
answers = []
news = threading.Condition()
def reads():
    talk = Words()
    number = 0
    while packet := agents.recv(1 << 18):
        talk.say(f"answer {number}/{rank}", packet.decode())
        number += 1

class Notebook:
    # The one of all ranks.
    def __init__(self):
        self.words = Words()
        self.asked = [0] * WORLD
        self.heard = [0] * WORLD
        self.cell = 0
    def ask(self, request, ranks=ALL):
        for one in ranks:
            text = request if isinstance(request, str) else codec.encode(request).decode()
            self.words.say(f"request {self.asked[one]}/{one}", text)
            self.asked[one] += 1
    def next(self, kind, ranks=ALL):
        found = {}
        for one in ranks:
            while not isinstance(found.get(one), kind):
                text = self.words.hear(f"answer {self.heard[one]}/{one}")
                self.heard[one] += 1
                found[one] = codec.decode(text.encode())[1]
        return found
    def begin(self, source, anew=False, ranks=ALL, text="", **more):
        self.cell += 1
        name = f"cell {self.cell}"
        parcel = dumped(Cell(source, name, texts={name: source}, **more), Seen(), None)
        data = base64.b64encode(parcel.path.read_bytes()).decode()
        request = p.RunCell(cell=self.cell, ranks=ranks, data=data, anew=anew, text=text)
        self.ask(request, ranks)
        return self.next(p.CellBegan, ranks)
    def run(self, source, **more):
        self.begin(source, **more)
        return self.next(p.CellEnded)[0]
    def until_they_wait(self, ranks=ALL):
        for one in ranks:
            self.words.hear(f"waits {self.cell}/{one}")
    def end(self, ranks=ALL):
        ends = self.next(p.CellEnded, ranks)
        outcomes = {one: end.ended.failure.type if end.ended.failure else end.ended.outcome for one, end in ends.items()}
        print(*outcomes.values(), *dict.fromkeys(end.shown for end in ends.values()), "|", out_of_step.notice(ends))
        return ends

def notebook():
    try:
        drive(Notebook())
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        os._exit(1)

{drive}
FIRST = '''
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
made = 0
def train(steps):
    global made
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        made += 1
        optimizer.step()
        if made == 5 and rank == 0:
            say("training")
'''
SUM = "total = torch.ones(1); dist.all_reduce(total)\\ntotal.item()"
main.say = lambda key: words.say(key)

def waits():
    # Say so when this rank has begun its next call.
    before = dict(groups._numbers())
    def look():
        while dict(groups._numbers()) == before:
            time.sleep(0.001)
        Words().say(f"waits {groups._notes.cell}/{rank}")
    in_a_thread(look)

main.waits = waits
for act in (agent, reads, *([notebook] if rank == 0 else [])):
    threading.Thread(target=act, daemon=True).start()
stay.CellLoop(of_rank, ours, main, {}).run()
words.meet("end")
os._exit(0)
"""


DRIVE = """
def drive(book):
    book.begin(FIRST)
    book.end()
    book.begin("train(10**9)")
    book.words.hear("training")
    book.ask(p.ParkAtStep(cell=book.cell, ranks=ALL))
    kind, step = stopping.step_of_all(book.next(p.StepCount))
    book.ask(p.StopAtStep(cell=book.cell, ranks=ALL, kind=kind, step=step))
    book.end()
    book.begin("train(3); made")
    made = {end.shown for end in book.end().values()}
    print("in step:", made == {str(step + 3)})
    book.begin("waits()\\ndist.recv(torch.ones(1), 0) if rank == 2 else dist.all_reduce(torch.ones(1))")
    book.until_they_wait()
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL))
    book.end()
    book.begin(SUM, anew=True)
    book.end()
    book.begin("if rank == 2:\\n    raise ValueError\\nwaits()\\ntry:\\n    dist.all_reduce(torch.ones(1))\\nexcept BaseException as error:\\n    caught = error\\n    raise")
    failed = book.next(p.CellEnded, (2,))
    print(failed[2].ended.failure.type)
    book.until_they_wait((0, 1))
    book.ask(p.InterruptCell(cell=book.cell, ranks=(0, 1), failed=2), (0, 1))
    book.end((0, 1))
    book.begin("None if rank == 2 else (type(caught).__name__, str(caught))", anew=True)
    book.end()
    book.begin('dist.init_process_group("gloo")\\n' + SUM)
    book.end()
    book.begin("if rank == 0: left = dist.broadcast(torch.ones(1), 0, async_op=True)")
    book.end()
    book.begin(SUM, anew=True)
    book.end()
    book.begin("model = torch.nn.parallel.DistributedDataParallel(model.module)")
    book.end()
    book.begin("train(1)", ranks=(1,))
    failure = book.next(p.CellEnded, (1,))[1].ended.failure
    print(failure.message, "in train" in failure.traceback)
    book.begin(SUM, anew=True)
    book.end()
    book.ask("end")
"""
# What ranks do, which of them end it by themselves, and others are interrupted. K is a rank.
ANY_ORDER = """
import random
SUM = "total = torch.ones(1); dist.all_reduce(total)\\ntotal.item()"
ALONE = "if rank != {k}: dist.all_reduce(torch.ones(1))"
CELLS = {
    "raises": ("if rank == {k}: raise ValueError\\n" + ALONE, "k"),
    "raises everywhere": ("raise ValueError", "all"),
    "sleeps": ("import time; time.sleep(3600)", "none"),
    "deadlock": (ALONE + "\\nelse: dist.recv(torch.ones(1), ({k} + 1) % 3)", "none"),
    "some": (ALONE, "k"),
    "training": ("train(10**9)", "none"),
    "a call more": ("if rank == {k}: left = dist.broadcast(torch.ones(1), {k}, async_op=True)", "all"),
    "a group": ("part = dist.new_group([0, 1, 2]); dist.barrier(part)", "all"),
    "no group": ("if rank != {k}: dist.new_group([0, 1, 2])", "k"),
    "init": ('dist.init_process_group("gloo")', "all"),
    "init again": ('dist.destroy_process_group(); dist.init_process_group("gloo")', "all"),
}
LOSES = '''
import signal, time
handler = signal.getsignal(signal.SIGINT)
signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, handler))
say(f"waits 2/{rank}")
time.sleep(3600)
'''
# A handler of the user's gets one signal an interrupt: a second one may mean "now".
HANDLES = '''
hits = []
signal.signal(signal.SIGINT, lambda *_: hits.append(1))
say(f"waits 3/{rank}")
while not hits:
    time.sleep(0.01)
time.sleep(3 * 0.2)
hits
'''
def drive(book):
    chance = random.Random(SEED)
    book.begin(FIRST)
    book.next(p.CellEnded)
    # An interrupt that comes just before a system call is lost as this one is.
    book.begin(LOSES)
    book.until_they_wait()
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL))
    is_stale = bool(out_of_step.notice(book.next(p.CellEnded)))
    book.begin(HANDLES)
    book.until_they_wait()
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL))
    ends = book.next(p.CellEnded)
    assert [end.shown for end in ends.values()] == ["[1]"] * 3
    for _ in range(9):
        name, k = chance.choice(list(CELLS)), chance.randrange(3)
        source, ending = CELLS[name]
        print(name, k)
        book.begin(source.replace("{k}", str(k)), is_stale)
        first = {"k": (k,), "all": ALL, "none": ()}[ending]
        ends = book.next(p.CellEnded, first)
        others = tuple(one for one in ALL if one not in first)
        if others:
            book.ask(p.InterruptCell(cell=book.cell, ranks=others, failed=k if first else -1), others)
            ends |= book.next(p.CellEnded, others)
        is_stale = bool(out_of_step.notice(ends))
        book.begin(SUM, is_stale)
        ends = book.next(p.CellEnded)
        is_stale = bool(out_of_step.notice(ends))
        shown = [end.shown or end.ended.failure.traceback for end in ends.values()]
        assert shown == ["3.0"] * 3 and not is_stale, (name, k, shown)
    book.ask("end")
    print("all work")
"""


@pytest.mark.slow
def test_ranks_are_stopped_at_a_step_or_where_they_are_and_go_on_with_the_next_cell(
    compiler_forks, tmp_path
):
    program = RANKS.replace("{drive}", DRIVE)
    [seen, *_] = gloo_ranks.run(compiler_forks, tmp_path, 3, program)
    anew = "Before the next cell the group is created again for all ranks."
    held = "Create again what uses the old group: model (DistributedDataParallel)."
    broken = (
        f"A process group was aborted, to free ranks that waited in it. {anew} {held}"
    )
    ahead = f"Some ranks have made more calls in a process group than others: rank 0 (last call: broadcast). {anew} {held}"
    alone = (
        "all_reduce waits for ranks 0,2: not in this cell, or at its end already. "
        "Let all ranks of the process group make this call."
    )
    assert seen[:2] == [
        "returned returned returned  | ",
        "signalled signalled signalled  | ",
    ]
    assert seen[2].startswith("returned returned returned ")
    assert seen[3] == "in step: True"
    assert seen[4:] == [
        f"signalled signalled signalled  | {broken}",
        "returned returned returned 3.0 | ",
        "ValueError",
        f"signalled signalled  | {broken}",
        "returned returned returned ('PeerFailed', 'rank 2 has failed')  | ",
        "returned returned returned 3.0 | ",
        f"returned returned returned  | {ahead}",
        "returned returned returned 3.0 | ",
        "returned returned returned  | ",
        f"{alone} True",
        "returned returned returned 3.0 | ",
    ]


@pytest.mark.slow
def test_the_next_cell_works_whatever_the_cells_before_have_done(
    compiler_forks, tmp_path
):
    drive = f"stay._BREAK_S = 0.2\nSEED = 1\n{ANY_ORDER}"
    program = RANKS.replace("{drive}", drive)
    [seen, *_] = gloo_ranks.run(compiler_forks, tmp_path, 3, program)
    assert seen[-1] == "all work"


NAMES = """
class Absent:
    def __reduce__(self):
        return int, ("no number",)
def drive(book):
    book.run("import gc, weakref\\nclass Model:\\n    pass")
    book.run("model = Model()\\nseen = weakref.ref(model)")
    print("deleted:", book.run("del model\\ngc.collect()\\nseen() is None").shown)
    book.run("model = Model()\\nseen = weakref.ref(model)")
    print("replaced:", book.run("model = None\\ngc.collect()\\nseen() is None").shown)
    sent = {"n": 5, "lr": 0.5, "_hidden": 1, "found": None, "made": None}
    made = "def make():\\n    global made\\n    made = 1\\nmake()"
    end = book.run(f"n = 5\\n_hidden = 1\\nif lr:\\n    found = 2\\n{made}", names=sent)
    print("names:", *end.names)
    print("not loaded:", book.run("n", names={"lr": Absent()}).ended.failure.type)
    book.ask("end")
"""


def test_a_cell_frees_old_values_and_its_names_are_those_that_it_has_assigned(
    torch_forks, tmp_path
):
    program = RANKS.replace("{drive}", NAMES)
    [seen, *_] = gloo_ranks.run(torch_forks, tmp_path, 1, program)
    assert seen == [
        "deleted: True",
        "replaced: True",
        "names: Model _hidden found gc made make model n seen weakref",
        "not loaded: ParcelError",
    ]


INTERRUPTS = """
import os
reading, _ = os.pipe()
os.dup2(reading, 0)
sys.stdin = open(0)
CATCHES = '''
import time
try:
    say("first")
    time.sleep(3600)
except KeyboardInterrupt:
    say("caught")
time.sleep(3600)
'''
CLEANS_UP = '''
try:
    say("works")
    time.sleep(3600)
finally:
    raise OSError("disk full")
'''
DEBUGGED = '''
import builtins
plain = builtins.input
def ask(prompt):
    say("prompt")
    return plain(prompt)
builtins.input = ask
try:
    breakpoint()
    time.sleep(0)
finally:
    builtins.input = plain
'''
FULL = '''
import gc, weakref
gc.disable()
class Cycle:
    def __init__(self):
        self.own = self
def fill():
    global seen
    large = Cycle()
    seen = weakref.ref(large)
    raise MemoryError
fill()
'''
def drive(book):
    book.begin(CATCHES)
    book.words.hear("first")
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL, failed=1))
    book.words.hear("caught")
    for failed in (1, -1, 1, -1):
        book.ask(p.InterruptCell(cell=book.cell, ranks=ALL, failed=failed))
    book.end()
    book.begin(CLEANS_UP)
    book.words.hear("works")
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL))
    book.end()
    book.begin(DEBUGGED)
    book.words.hear("prompt")
    book.ask(p.InterruptCell(cell=book.cell, ranks=ALL))
    book.end()
    book.begin(FULL, is_users=True)
    book.end()
    print("freed:", book.run("seen() is None").shown)
    kept = len(list(folder.glob("*.cell*")))
    for value in range(3):
        book.run("import os\\ndef later(): pass", names={"lr": value})
    print("files:", len(list(folder.glob("*.cell*"))) - kept)
    book.ask("end")
"""


def test_interrupts_take_effect_and_hide_no_error_of_the_cell(torch_forks, tmp_path):
    program = RANKS.replace("{drive}", INTERRUPTS)
    [seen, *_] = gloo_ranks.run(torch_forks, tmp_path, 1, program)
    own = ("signalled", "OSError", "MemoryError", "returned", "freed", "files")
    shown = [line.removeprefix("(Pdb) ") for line in seen]
    assert [line for line in shown if line.startswith(own)] == [
        "signalled  | ",
        "OSError  | ",
        "signalled  | ",
        "MemoryError  | ",
        "freed: True",
        "files: 1",
    ]


# Each cell waits for ranks that do not run it. The next one, of all ranks, works.
ALONE = """
stay._BREAK_S = stay._ALONE_S = 0.2
SUM = "rank = dist.get_rank()\\ntotal = torch.ones(1); dist.all_reduce(total)\\ntotal.item()"
GROUP = "part = dist.new_group([0, 1])\\n"
def drive(book):
    book.begin('import torch, torch.distributed as dist\\ndist.init_process_group("gloo")\\n' + GROUP)
    last = book.next(p.CellEnded)
    for ranks, source in (
        ((0,), SUM),
        ((0, 1), SUM),
        ((1,), "dist.barrier(part)"),
        ((2,), "dist.new_group([0, 2])"),
        ((1,), 'dist.destroy_process_group(); dist.init_process_group("gloo")'),
        ((0,), "dist.recv(total, src=1)"),
        ((1,), "dist.send(total, group_dst=0, group=part)"),
        ((2,), "dist.monitored_barrier()"),
    ):
        book.begin(source, ranks=ranks)
        ends = book.next(p.CellEnded, ranks)
        last |= ends
        for end in ends.values():
            failure = end.ended.failure
            print(failure.message)
            assert f'"cell {book.cell}", line' in failure.traceback, failure.traceback
        assert out_of_step.notice(last)
        book.begin(GROUP + SUM, anew=True)
        last = book.next(p.CellEnded)
        print(*(end.shown for end in last.values()), out_of_step.notice(last))
    book.begin("dist.barrier(part); 'done'", ranks=(0, 1))
    print(*(end.shown for end in book.next(p.CellEnded, (0, 1)).values()))
    book.ask("end")
"""


@pytest.mark.slow
def test_a_cell_that_waits_for_ranks_which_do_not_run_it_fails_and_names_the_call(
    torch_forks, tmp_path, golden
):
    program = RANKS.replace("{drive}", ALONE)
    [seen, *_] = gloo_ranks.run(torch_forks, tmp_path, 3, program)
    golden("\n".join(seen))


# Ranks end the cell, and others wait in a call: of which the ended ones have made their part, or have not.
SOME_END = """
from distmagic.remote.rank import calls
stay._BREAK_S = stay._ALONE_S = 0.2
plain, looks = calls.waiting, []
def counted(*arguments):
    looks.append(groups._notes.cell)
    if looks.count(looks[-1]) == 3:
        Words().say(f"three looks {looks[-1]}/{rank}")
    return plain(*arguments)
calls.waiting = counted
main.hear_looks = lambda of: Words().hear(f"three looks {groups._notes.cell}/{of}")
main.say_works = lambda: Words().say(f"waits {groups._notes.cell}/{rank}")
BEGIN = '''
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.ones(1)
'''
MADE = '''
if rank == 2:
    hear_looks(1)
left = dist.all_reduce(total, async_op=True)
if rank > 0:
    left.wait()
'''
# Rank 1 loads the values of a cell for so long that others have ended the cell before it begins there.
take = stay.CellLoop._take
def taken(self, message):
    take(self, message)
    if isinstance(message, p.OthersEnded):
        Words().say(f"told {message.cell}/{rank}")
stay.CellLoop._take = taken
main.load = lambda: rank == 1 and Words().hear(f"told {groups._notes.cell + 1}/{rank}")
class Slow:
    def __reduce__(self):
        return eval, ("__import__('sys').modules['__main__'].load()",)
# A thread of each rank saves, also of one that has ended the cell. Meanwhile the others wait for something else.
SAVES = '''
import threading
def save():
    if rank == 0:
        hear_looks(1)
        hear_looks(2)
    dist.all_reduce(torch.ones(1))
saving = threading.Thread(target=save)
saving.start()
if rank > 0:
    hear_looks(rank)
    saving.join()
'''
CATCHES = '''
import time
if rank > 0:
    try:
        say_works()
        time.sleep(3600)
    except BaseException:
        dist.all_reduce(total)
'''
RECEIVES = "dist.recv(total, 0) if rank == 1 else None"
def drive(book):
    book.begin(BEGIN)
    book.next(p.CellEnded)
    for source, ended in (
        (MADE, (0,)), (SAVES, (0,)), ("if rank == 1: dist.barrier()", (0, 2)), (CATCHES, (0,)),
        (RECEIVES, (0, 2)),
    ):
        slow = {"slow": Slow()} if "barrier" in source else {}
        book.begin(source, anew=source in (CATCHES, RECEIVES), names=slow)
        ends = book.next(p.CellEnded, ended)
        others = tuple(one for one in ALL if one not in ended)
        book.ask(p.OthersEnded(cell=book.cell, ranks=others, ended=ended, groups=ends[0].groups), others)
        if source == CATCHES:
            book.until_they_wait(others)
            book.ask(p.InterruptCell(cell=book.cell, ranks=others, failed=0), others)
        for end in book.next(p.CellEnded, others).values():
            print(end.ended.failure.message if end.ended.failure else end.ended.outcome)
    book.ask("end")
"""


def test_a_rank_waits_no_longer_for_ranks_that_have_ended_the_cell_without_its_call(
    torch_forks, tmp_path, golden
):
    program = RANKS.replace("{drive}", SOME_END)
    [seen, *_] = gloo_ranks.run(torch_forks, tmp_path, 3, program)
    golden("\n".join(seen))


class Begun(Exception):
    """A rank reports that its cell begins."""


def test_a_rank_counts_who_has_ended_its_cell_before_it_begins_there(monkeypatch):
    def send(_):
        raise Begun

    found = []
    looks = iter([False, True])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(stay.sources, "form_of_results", lambda _: None)
    monkeypatch.setattr(stay.calls, "waiting", lambda absent, _: found.append(absent))
    this = cast(Any, types.SimpleNamespace(rank=1, code=None))
    conn = cast(Any, None)
    loop: Any = stay.CellLoop(this, conn, types.ModuleType("m"), {})
    # Over a new link both come at once.
    loop._take(p.RunCell(cell=1, ranks=(0, 1)))
    loop._take(p.OthersEnded(cell=1, ranks=(1,), ended=(0,)))
    loop._send = send
    with pytest.raises(Begun):
        loop._run_cell(loop._inbox.get())
    loop._running = 1
    loop._over = types.SimpleNamespace(wait=lambda _: next(looks))
    loop._look(1)
    assert found == [{0: ()}]


LONG = """
import random
from distmagic.remote.wire.cells import MOST_TEXT
from distmagic.remote.wire.clipping import clipped
def drive(book):
    text = "x = 1\\n" * 8_000
    began = book.begin("", text=clipped(text, MOST_TEXT), names={"data": random.Random(5).randbytes(55_000)})
    print(began[0].text == text, book.next(p.CellEnded)[0].ended.outcome)
    book.ask("end")
"""


def test_the_text_of_a_long_cell_is_kept_whole_beside_its_values(torch_forks, tmp_path):
    program = RANKS.replace("{drive}", LONG)
    [seen, *_] = gloo_ranks.run(torch_forks, tmp_path, 1, program)
    assert seen == ["True returned"]
