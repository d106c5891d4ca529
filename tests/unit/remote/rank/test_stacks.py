"""faulthandler's text, read: what real ranks write, what a hostile or torn text gives, and when an answer is whole."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.rank import stacks
from distmagic.remote.rank.stacks import Sources, is_whole, threads_of
from distmagic.remote.wire import protocol as p
from tests.builders.shell import completed
from tests.lab.waiting import wait_until

BUNDLE = "/home/me/.distmagic/blobs/aa"
CODE = "/home/me/.distmagic/blobs/bb"
SOURCES = Sources(
    labels={"/tmp/ipykernel_7/12.py": "Cell In[3]"},
    texts={
        "/tmp/ipykernel_7/12.py": "#%%distributed\ndef train():\n    all_reduce(x)\n\ntrain()\n",
        "/me/run.py": "a\n",
    },
    modules=f"{CODE}/modules/",
    own=f"{BUNDLE}/",
)
TEXT = f"""\
Thread 0x00007f0a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f0b (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "{CODE}/modules/loader.py", line 7 in fill
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0c (most recent call first):
  File "/opt/conda/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/opt/conda/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/tmp/ipykernel_7/12.py", line 3 in train
  File "/tmp/ipykernel_7/12.py", line 5 in <module>
  File "{BUNDLE}/distmagic/remote/values/call.py", line 50 in perform
  File "{BUNDLE}/distmagic/remote/rank/worker.py", line 60 in main
  File "<frozen runpy>", line 88 in _run_code
"""


def frame(file: str, line: int, function: str, **more: object) -> p.Frame:
    return p.Frame(file=file, line=line, function=function, **more)  # type: ignore[arg-type]


def test_a_ranks_threads_as_their_user_knows_them():
    main, other = threads_of(TEXT, SOURCES)
    assert main.frames == (
        frame("Cell In[3]", 5, "<module>", mine=True, text="train()"),
        frame("Cell In[3]", 3, "train", mine=True, text="all_reduce(x)"),
        frame("torch/distributed/c10d_logger.py", 81, "wrapper"),
        frame("torch/distributed/distributed_c10d.py", 2810, "all_reduce"),
    )
    assert other.frames == (
        frame("loader.py", 7, "fill", mine=True),
        frame("queue.py", 171, "get"),
    )


@pytest.mark.parametrize(("file", "shown", "mine"), [
    ("/tmp/ipykernel_7/12.py", "Cell In[3]", True),
    ("/me/run.py", "/me/run.py", True),
    (f"{CODE}/modules/pkg/data.py", "pkg/data.py", True),
    ("/home/me/project/data.py", "/home/me/project/data.py", True),
    ("/home/me/python3.11/data.py", "/home/me/python3.11/data.py", True),
    ("/usr/lib/python3.11/queue.py", "queue.py", False),
    ("/usr/lib64/python3.11/asyncio/base_events.py", "asyncio/base_events.py", False),
    ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py", False),
    ("/v/lib/python3.11/site-packages/torch/nn/a.py", "torch/nn/a.py", False),
    ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>", False),
    ("<string>", "<string>", False),
    ("/" + "x" * 300 + ".py", "x" * 197 + ".py", True),
    ('/a "b", line 3 in c.py', '/a "b", line 3 in c.py', True),
])  # fmt: skip
def test_whose_a_file_is(file, shown, mine):
    (main,) = threads_of(
        f'Thread 0x1 (most recent call first):\n  File "{file}", line 4 in f\n', SOURCES
    )
    assert [(f.file, f.line, f.function, f.mine) for f in main.frames] == [
        (shown, 4, "f", mine)
    ]


def test_frames_of_distmagic_are_hidden_wherever_they_are():
    text = TEXT.replace("Current thread 0x00007f0c (most recent call first):\n",
                        f'Current thread 0x00007f0c (most recent call first):\n  File "{BUNDLE}/distmagic/remote/rank/report.py", line 9 in pump\n')  # fmt: skip
    assert threads_of(text, SOURCES) == threads_of(TEXT, SOURCES)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/tmp/ipykernel_7/123.py", True),
        ("<ipython-input-3-0f1e>", True),
        ("/home/me/train.py", True),
        ("<frozen runpy>", False),
        ("<eval_with_key>.4", False),
        ("/tmp/torchinductor_me/kq/ckq7.py", False),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        (stacks.__file__, False),
    ],
)
def test_whose_the_file_of_a_recorded_call_is(file, is_users):
    assert stacks.is_users(file) == is_users


def test_of_two_dumps_the_last_counts():
    later = TEXT.replace("line 3 in train", "line 4 in train")
    assert threads_of(TEXT + later, SOURCES) == threads_of(later, SOURCES)


def test_deep_stacks_are_bounded_and_keep_the_users_innermost_frame():
    inner = "".join(
        f'  File "/usr/lib/python3.11/json.py", line {i} in scan\n' for i in range(99)
    )
    (main,) = threads_of(
        f'Thread 0x1 (most recent call first):\n{inner}  File "/me/run.py", line 1 in f\n  ...\n',
        SOURCES,
    )
    assert len(main.frames) == stacks.MAX_FRAMES
    assert main.frames[0] == frame("/me/run.py", 1, "f", mine=True, text="a")
    assert main.frames[-1].line == 0


def test_newer_pythons_write_more():
    text = (
        TEXT.replace("0x00007f0c (most", "0x00007f0c [MainThread] (most")
        + '\nCurrent thread\'s C stack trace (most recent call first):\n  Binary file "/usr/bin/python3", at +0x1 [0x2]\n'
    )
    assert threads_of(text, SOURCES) == threads_of(TEXT, SOURCES)
    assert is_whole(text, BUNDLE)


def test_when_an_answer_is_whole():
    end = TEXT.index("line 60 in main\n") + len("line 60 in main\n")
    assert not any(is_whole(TEXT[:cut], BUNDLE) for cut in range(end))
    assert is_whole(TEXT[:end], BUNDLE)
    assert is_whole(TEXT, BUNDLE)
    assert is_whole(
        'Thread 0x1 (most recent call first):\n  File "a", line 1 in f\n  ...\n', BUNDLE
    )
    # A second one has begun.
    assert not is_whole(TEXT + "Thread 0x1 (most recent call first):\n", BUNDLE)


LINES = st.sampled_from(
    [
        *TEXT.splitlines(),
        "",
        "...",
        "  ...",
        '  File "',
        "Thread 0x",
        "  <no Python frame>",
    ]
)


@given(st.lists(LINES | st.text(max_size=60), max_size=50).map("\n".join))
def test_any_text_gives_threads_that_travel(text):
    found = threads_of(text, SOURCES)
    is_whole(text, BUNDLE)
    event = p.Stacks(request_id="a", rank=0, local_rank=0, threads=found)
    line = p.encode(event)
    assert len(line) < p.MAX_LINE_BYTES
    assert p.decode(line) == (0, event)


def test_the_largest_answer_travels():
    name = "\\U0001f600" * 40 + "/me.py"
    block = "".join(
        f'  File "/{name}", line 999999999 in {"f" * 400}\n' for _ in range(100)
    )
    text = "".join(
        f"Thread 0x{i:x} (most recent call first):\n{block}\n" for i in range(1, 100)
    )
    assert (
        len(
            p.encode(
                p.Stacks(
                    request_id="a",
                    rank=0,
                    local_rank=0,
                    threads=threads_of(text, SOURCES),
                )
            )
        )
        < p.MAX_LINE_BYTES
    )


# ---- a process that answers


@pytest.fixture
def process(tmp_path):
    """A function: start Python code in a process that answers; it ends with the test."""
    started = []

    def start(code: str) -> subprocess.Popen[bytes]:
        head = f"from pathlib import Path; from distmagic.remote.rank import stacks; stacks.answer(Path({str(tmp_path)!r}))\n"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", head + code], stdout=subprocess.PIPE
            )
        )
        assert started[-1].stdout.readline() == b"up\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def test_a_process_answers_while_its_main_thread_hangs_in_c(process, tmp_path):
    child = process(
        "import threading; lock = threading.Lock(); lock.acquire(); print('up', flush=True); lock.acquire()"
    )
    assert stacks.is_ready(tmp_path, child.pid)
    for _ in range(3):
        os.kill(child.pid, stacks.SIGNAL)
    file = stacks.file_of(tmp_path, child.pid)
    text = wait_until(
        lambda: text if (text := file.read_text()).count("\n") == 6 else "",
        "three answers",
    )
    (main,) = threads_of(text, Sources())
    assert [(f.file, f.function) for f in main.frames] == [("<string>", "<module>")]
    assert child.poll() is None


def test_a_process_is_ready_where_a_folder_is_a_symbolic_link(process, tmp_path):
    """As /tmp is on some hosts."""
    child = process("import time; print('up', flush=True); time.sleep(99)")
    (tmp_path / "link").symlink_to(tmp_path)
    assert stacks.is_ready(tmp_path / "link", child.pid)


@pytest.mark.parametrize("code", [
    "import os, sys; print('up', flush=True); os.execv(sys.executable, [sys.executable, '-c', 'import time; print(7, flush=True); time.sleep(99)'])",
    "import signal, time; signal.signal(stacks.SIGNAL, signal.SIG_DFL); print('up', flush=True); print(7, flush=True); time.sleep(99)",
    "import os, time; print('up', flush=True); os.closerange(3, 100); print(7, flush=True); time.sleep(99)",
])  # fmt: skip
def test_a_process_that_would_die_of_the_signal_or_write_elsewhere_is_not_ready(
    process, tmp_path, code
):
    child = process(code)
    assert child.stdout.readline() == b"7\n"
    assert not stacks.is_ready(tmp_path, child.pid)


def test_a_process_that_is_gone_is_not_ready(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    assert not stacks.is_ready(tmp_path, child.pid)


ERRNO = """
import ctypes, errno
c = ctypes.PyDLL(None)
c.__errno_location.restype = ctypes.POINTER(ctypes.c_int)
place = c.__errno_location()
for _ in range(3):
    place[0] = errno.ENOENT
    getattr(c, "raise")(stacks.SIGNAL)
    print(place[0] == errno.ENOENT, Path(stacks.file_of(run_dir, os.getpid())).read_text().count("Current thread"))
"""


def test_an_answer_leaves_the_reason_of_a_call_that_fails_just_then(tmp_path):
    head = f"import os\nfrom pathlib import Path\nfrom distmagic.remote.rank import stacks\nrun_dir = Path({str(tmp_path)!r})\nstacks.answer(run_dir)\n"
    done = completed([sys.executable, "-c", head + ERRNO])
    assert done.stdout == "True 1\nTrue 2\nTrue 3\n"


def test_where_it_cannot_answer_the_rank_does_without(tmp_path):
    before = signal.getsignal(stacks.SIGNAL)
    stacks.answer(tmp_path / "missing")
    assert signal.getsignal(stacks.SIGNAL) == before
    assert not faulthandler.unregister(stacks.SIGNAL)
    assert not Path(tmp_path / "missing").exists()
