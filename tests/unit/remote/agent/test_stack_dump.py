"""The agent's side of a stack dump, on real processes: those that answer, are stopped, are not ready, or end meanwhile."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from distmagic.remote.agent.stack_dump import StackDumper
from distmagic.remote.checkup import nccl_ras
from distmagic.remote.rank import stacks
from distmagic.remote.records import journal
from distmagic.remote.records.journal import Journal
from distmagic.remote.system import processes, threads
from distmagic.remote.wire import protocol
from tests.lab.waiting import wait_until

BUNDLE = "/no/bundle"
SLEEPS = "import time; print('up', flush=True); time.sleep(99)"
ANSWERS = "from pathlib import Path; from distmagic.remote.rank import stacks; stacks.answer(Path('.'))\n"
# Its outermost frame is called as that of a rank is, so that the answer is known to be whole.
AS_A_RANK = f"exec(compile('def main():\\n  import time; print(1, flush=True); time.sleep(99)\\nmain()', '{BUNDLE}/distmagic/remote/rank/worker.py', 'exec'))"


class Node:
    """A node with some ranks: processes in `folder`, which they know under its own name."""

    def __init__(self, folder):
        code = folder / "code"
        with zipfile.ZipFile(code, "w") as archive:
            archive.writestr(
                "sources.json",
                json.dumps({"texts": {"<string>": "a\nlast line\n"}, "labels": {}}),
            )
        self.folder, self.ranks, self.now = folder, [], 0.0
        self.journal = Journal(folder)
        self.dumper = StackDumper(folder, code, BUNDLE, self.journal)

    def start(self, code: str) -> subprocess.Popen[bytes]:
        code = code.replace("Path('.')", f"Path({str(self.folder)!r})")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout.readline()
        hello = protocol.Worker(
            rank=len(self.ranks),
            local_rank=len(self.ranks),
            world_size=9,
            restart=0,
            pid=child.pid,
        )
        self.ranks.append(SimpleNamespace(
            hello=hello, process=processes.read(child.pid), is_over=False, is_running=True, child=child,
        ))  # fmt: skip
        return child

    def has_written(self, pid: int) -> bool:
        text = stacks.file_of(self.folder, pid).read_text()
        return stacks.is_whole(text, BUNDLE) and stacks.is_ready(self.folder, pid)

    def step(self, seconds: float = 0.05) -> list[protocol.Message]:
        """Let time go on; return all that is in the journal."""
        self.now += seconds
        self.dumper.step(self.now, self.ranks)
        return [protocol.decode(line)[1] for _, line in journal.read(self.folder)]

    def stacks(
        self, name: str, seconds: float = 0.0, *, at_most: float = math.inf
    ) -> dict[int, protocol.Stacks]:
        """Ask for the stacks; return the answers by rank.

        At most so many seconds go by: between 1 and 4 a rank has been sent the signal, and is not yet given up.
        """
        self.dumper.request(name)
        end = self.now + at_most

        def is_done() -> bool:
            ends = [
                one
                for one in self.step(seconds if self.now < end else 0.0)
                if isinstance(one, protocol.StacksDone)
            ]
            return any(one.request_id == name for one in ends)

        wait_until(is_done, "the end of the stack dump")
        return {
            one.rank: one
            for one in self.step()
            if isinstance(one, protocol.Stacks) and one.request_id == name
        }


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    for rank in made.ranks:
        rank.child.kill()
        rank.child.communicate()


def test_a_rank_answers_and_goes_on(node):
    child = node.start(ANSWERS + AS_A_RANK)
    for name in ("a", "b"):
        (answer,) = node.stacks(name).values()
        assert (answer.silence, answer.threads[0].frames[0].text) == ("", "last line")
    assert child.poll() is None
    assert [
        one.ranks for one in node.step() if isinstance(one, protocol.StacksDone)
    ] == [1, 1]


def test_what_a_rank_has_left_is_told_once_when_it_is_over(node):
    children = node.start(SLEEPS), node.start(SLEEPS)
    call = protocol.CallRecord(number=1, name="all_reduce", sizes="[4]", is_over=False)
    made = (protocol.GroupRecord(backend="gloo", calls=(call,)),)
    # The second one has only answered a question, before that.
    for rank, request_id in enumerate((protocol.LEFT, "")):
        one = protocol.Stacks(
            request_id=request_id, rank=rank, local_rank=rank, calls=made
        )
        path = node.folder / f"calls-{children[rank].pid}"
        path.write_bytes(protocol.encode(one) + b"-\n")
    assert node.step() == []
    for rank in node.ranks:
        rank.is_over = True
    for _ in range(2):
        (told,) = node.step()
        assert (told.request_id, told.rank, told.calls) == (protocol.LEFT, 0, made)


def test_a_rank_that_is_asked_before_its_end_has_left_its_calls(node):
    """One that has left its calls before is not asked, nor one without a thread for it, nor one that is over."""
    asked, before, without, over = (node.start(SLEEPS) for _ in range(4))
    path = node.folder / f"calls-{asked.pid}"
    for child in (asked, over):
        (node.folder / f"calls-{child.pid}").write_bytes(b"-")
    left = protocol.Stacks(request_id=protocol.LEFT, rank=1, local_rank=1)
    text = protocol.encode(left) + b"-\n"
    (node.folder / f"calls-{before.pid}").write_bytes(text)
    node.ranks[3].is_over = True
    node.dumper.ask_last(node.ranks)
    sizes = [path.stat().st_size for path in sorted(node.folder.glob("calls-*"))]
    assert sorted(sizes) == [0, 1, len(text)]
    assert not (node.folder / f"calls-{without.pid}").exists()
    assert not node.dumper.has_answers(node.ranks)
    answer = protocol.Stacks(request_id="", rank=0, local_rank=0)
    path.write_bytes(protocol.encode(answer) + b"-\n")
    assert node.dumper.has_answers(node.ranks)
    node.ranks[0].is_over = True
    (told,) = node.step()
    assert (told.request_id, told.rank) == (protocol.LEFT, 0)


def test_a_stopped_rank_holds_up_nobody_and_answers_later(node, golden):
    first, second = node.start(ANSWERS + AS_A_RANK), node.start(ANSWERS + AS_A_RANK)
    first.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.read(first.pid).state == "T", "the process to stop")
    node.dumper.request("a")
    wait_until(
        lambda: any(isinstance(one, protocol.Stacks) for one in node.step(0.0)),
        "the other's answer",
    )
    answers = node.stacks("a", 0.6)
    golden(answers[0].silence)
    assert answers[1].silence == ""
    first.send_signal(signal.SIGCONT)
    # While it finishes its late answer, it takes no further signal.
    wait_until(lambda: node.has_written(first.pid), "the late answer")
    assert [one.silence for one in node.stacks("b").values()] == ["", ""]
    assert second.poll() is None


def test_a_rank_that_is_not_ready_is_not_sent_the_signal(node, golden):
    child = node.start(SLEEPS)
    (answer,) = node.stacks("a").values()
    golden(answer.silence)
    assert child.poll() is None


def test_a_rank_that_gives_no_answer(node, golden):
    node.start(
        f"{ANSWERS}import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [stacks.SIGNAL])\n{SLEEPS}"
    )
    (answer,) = node.stacks("a", 0.5).values()
    golden(answer.silence)


def test_a_rank_that_does_not_look_like_ours_is_told_all_the_same(node):
    child = node.start(ANSWERS + SLEEPS)
    node.dumper.request("a")
    node.step(0.0)
    text = stacks.file_of(node.folder, child.pid)
    wait_until(lambda: "in <module>\n" in text.read_text(), "its answer")
    (answer,) = node.stacks("a", 0.5).values()
    assert [frame.function for frame in answer.threads[0].frames] == ["<module>"]


def test_a_rank_that_ends_meanwhile(node):
    child = node.start(ANSWERS + AS_A_RANK)
    node.dumper.request("a")
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.read(child.pid).state == "T", "the process to stop")
    node.step()
    child.kill()
    wait_until(lambda: processes.read(child.pid).state == "Z", "its end")
    (answer,) = node.stacks("a", 0.6).values()
    assert answer.silence == "its process has ended"


# As torch 2.13 has them: of gloo, whose calls are retired when they are over, and of NCCL, which sees their end.
RECORDED = """
import json, os, sys, types
from types import SimpleNamespace
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
def entry(group, number, name, sizes, retired, state="scheduled", **more):
    return {"process_group": group, "collective_seq_id": number, "profiling_name": name, "input_sizes": sizes,
            "input_dtypes": ["Float"] * len(sizes), "retired": retired, "state": state, "is_p2p": False,
            "time_created_ns": number, **more}
default, pairs, gone = ["0", "default_pg"], ["1", "pairs"], ["7", "gone"]
gloo = [entry(default, 1, "gloo:all_reduce", [[4]], True), entry(default, 0, "gloo:send", [[4]], False, is_p2p=True),
        entry(pairs, 1, "gloo:barrier", [], False), entry(gone, 1, "gloo:barrier", [], True)]
nccl = [entry(default, n, "nccl:all_gather", [[2, 3], [4]], False, "completed") for n in range(1, 80)]
module = sys.modules["torch._C._distributed_c10d"] = types.ModuleType("recorder")
module._dump_fr_trace_json = lambda *_: json.dumps({"entries": gloo})
module._dump_nccl_trace_json = lambda *_: json.dumps({"entries": nccl})
world = SimpleNamespace(pg_names={1: "0", 2: "1"}, pg_group_ranks={1: {0: 0, 1: 1}, 2: {0: 0, 5: 1, 6: 2}})
from pathlib import Path
from distmagic.remote.rank import calls
calls.answer(Path('.'), SimpleNamespace(_world=world))
"""
HOLDS = "import ctypes; print(1, flush=True); ctypes.PyDLL(None).sleep(99)"


def asked_quietly(node, seconds: float = 0.0) -> list[protocol.Message]:
    node.dumper.request("q", quietly=True)

    def is_done() -> bool:
        return any(isinstance(one, protocol.StacksDone) for one in node.step(seconds))

    wait_until(is_done, "the end of the quiet question")
    return [one for one in node.step() if isinstance(one, protocol.Stacks)]


def test_a_rank_answers_with_its_calls_and_gets_no_signal(node):
    node.start(RECORDED + AS_A_RANK)
    node.start(ANSWERS + AS_A_RANK)
    (answer,) = asked_quietly(node)
    assert answer.rank == 0
    assert [frame.function for frame in answer.threads[0].frames] == ["<module>"]
    gloo, pairs, nccl = sorted(
        answer.calls, key=lambda group: (group.backend, len(group.ranks))
    )
    all_reduce = protocol.CallRecord(
        number=1, name="all_reduce", sizes="[4]", is_over=True
    )
    assert (gloo.name, gloo.ranks, gloo.calls, gloo.waits_s) == (
        "",
        "",
        (all_reduce,),
        0,
    )
    assert (pairs.name, pairs.ranks) == ("pairs", "0,5-6")
    assert pairs.calls == (protocol.CallRecord(number=1, name="barrier"),)
    assert pairs.waits_s > 1000
    assert [one.number for one in nccl.calls] == list(range(30, 80))
    last = protocol.CallRecord(
        number=79, name="all_gather", sizes="[2, 3], [4]", is_over=True
    )
    assert nccl.calls[-1] == last


def test_a_rank_whose_thread_can_not_answer_gets_the_signal_unless_asked_quietly(node):
    """Its main thread holds the interpreter."""
    node.start(ANSWERS + RECORDED + HOLDS)
    assert asked_quietly(node, 0.5) == []
    (answer,) = node.stacks("a", 0.5, at_most=2).values()
    assert answer.calls == ()
    assert answer.threads


def test_a_torch_that_records_otherwise_says_nothing_of_calls(node):
    node.start(
        ANSWERS
        + RECORDED
        + "del module._dump_fr_trace_json; nccl[0] = {}\n"
        + AS_A_RANK
    )
    (answer,) = node.stacks("a", 0.5, at_most=2).values()
    assert (answer.calls, answer.silence) == ((), "")


def test_a_node_without_ranks_answers_at_once(node):
    node.dumper.request("a")
    assert node.step() == [protocol.StacksDone(request_id="a", ranks=0)]


def test_nccl_is_asked_which_processes_it_misses_unless_asked_quietly(
    node, monkeypatch, golden
):
    asked = []
    answers = ["DEAD\n  1 job process is considered dead\n\n  Process 7 on node 10.0.0.2\n", ""]  # fmt: skip
    monkeypatch.setattr(nccl_ras, "errors", lambda pids: asked.append(pids) or answers.pop(0))  # fmt: skip
    node.start(ANSWERS + AS_A_RANK)
    asked_quietly(node)
    assert asked == []
    node.stacks("a")
    found = wait_until(
        lambda: [one for one in node.step() if isinstance(one, protocol.Notice)],
        "its answer",
    )
    golden(found[0].text)
    node.stacks("b")
    wait_until(lambda: len(asked) == 2, "the second answer")
    assert asked == [[rank.hello.pid for rank in node.ranks]] * 2
    assert not answers
    assert [one for one in node.step() if isinstance(one, protocol.Notice)] == found


def test_nccl_is_asked_on_the_node_of_rank_0_alone(node, monkeypatch):
    monkeypatch.setattr(threads, "begin", pytest.fail)
    node.start(ANSWERS + AS_A_RANK)
    node.ranks[0].hello = replace(node.ranks[0].hello, rank=8)
    assert list(node.stacks("a")) == [8]


def test_two_calls_at_once_are_both_answered(node):
    node.start(ANSWERS + AS_A_RANK)
    for name in ("a", "b", "a"):
        node.dumper.request(name)
    wait_until(
        lambda: sum(isinstance(one, protocol.StacksDone) for one in node.step()) == 2,
        "both ends",
    )
    assert [
        one.request_id for one in node.step() if isinstance(one, protocol.Stacks)
    ] == ["a", "b"]
