"""What a forked process is like: unwound, with its own session, streams, variables and end. No torch in here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from distmagic.remote.contact import template_client
from distmagic.remote.engine import forking
from distmagic.remote.wire.protocol import TemplateRequest
from tests.builders.shell import completed

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="hosts run Linux"
)


def forked(act: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Have a program fork a child in the middle of things, which resets itself and calls `act`; return the finished program."""
    program = textwrap.dedent("""
        import os, signal, sys, threading
        from distmagic.remote.engine import forking

        class Holder:
            def __init__(self):
                self.me, self.fd = self, open("/dev/null")
        def act():
            {act}
        def child():
            out, err = os.dup(1), os.dup(2)
            forking.reset_process({{"PATH": "/bin", "COLOUR": "red"}}, out, err, cwd="/")
            forking.exit_like_python(act)
        def middle():
            holder = Holder()
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(os.pipe2(os.O_NONBLOCK)[1])
            {before}
            pid = forking.fork(child)
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may ignore it
        forking.remember(dict(os.environ), ())
        forking.run(middle)
    """).format(
        act=textwrap.indent(textwrap.dedent(act).strip(), " " * 4).strip(),
        before=before,
    )
    return completed([sys.executable, "-u", "-c", program], check=False)


def test_nothing_of_the_parent_is_left_in_it():
    done = forked("""
        import json, traceback
        print(json.dumps({
            "stack": [frame.name for frame in traceback.extract_stack()],
            "environ": dict(os.environ), "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid(),
            "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:3], "count": len(os.listdir("/proc/self/fd")),
            "term": str(signal.getsignal(signal.SIGTERM)), "int": signal.getsignal(signal.SIGINT).__name__,
            "wakeup": signal.set_wakeup_fd(-1), "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "stdout": [type(sys.stdout.buffer).__name__, sys.stdout.write_through, sys.stdout.name, sys.stdout.mode],
            "stdin": [type(sys.stdin.buffer).__name__, sys.stdin.read(), sys.stdin.name, sys.stdin.mode],
        }))
    """)
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "stack": ["<module>", "run", "child", "exit_like_python", "act"],
        "environ": {"PATH": "/bin", "COLOUR": "red"},
        "cwd": "/",
        "leads": True,
        "fds": ["0", "1", "2"],
        "count": 4,  # and the listing's own
        "term": "0",
        "int": "default_int_handler",
        "wakeup": -1,
        "mask": [],
        "stdout": ["FileIO", True, "<stdout>", "w"],
        "stdin": ["BufferedReader", "", "<stdin>", "r"],
    }


def test_it_ends_as_python_does(tmp_path):
    done = forked(f"""
        import atexit, time
        atexit.register(print, "at exit")
        sys.modules["__main__"].kept = open({str(tmp_path / "kept")!r}, "w")
        sys.modules["__main__"].kept.write("flushed")
        threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
        sys.exit(3)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a thread\nat exit\n", "")
    assert (tmp_path / "kept").read_text() == "flushed"


LATE_MODULE = """
import json, sys
FILE = open("tee", "w")
class Tee:  # without `closed`
    def write(self, text):
        sys.__stdout__.write(text)
        FILE.write(text)
    def flush(self):
        FILE.flush()
class Writer:
    def __init__(self):
        self.file, self.rows = open("rows", "w"), []
    def __del__(self):
        self.file.write(json.dumps(self.rows))
WRITER = Writer()
class Holder:
    file = open("held", "w")
WRITER.rows.append(Holder.file.write("abc"))
sys.stdout = Tee()
"""


def test_what_modules_hold_is_written_at_its_end_and_still_has_what_it_uses(tmp_path):
    (tmp_path / "late_module.py").write_text(LATE_MODULE)
    done = forked(f"""
        os.chdir({str(tmp_path)!r})
        sys.path.append("")
        import json, late_module
        sys.modules["colours"] = type("colours", (), {{}})  # no module
        print("hello")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    written = [(tmp_path / name).read_text() for name in ("tee", "rows", "held")]
    assert written == ["hello\n", "[3]", "abc"]


def test_a_module_of_the_template_that_is_loaded_again_hides_no_other(tmp_path):
    (tmp_path / "late_module.py").write_text("FILE = open('held', 'w')")
    done = forked(f"""
        os.chdir({str(tmp_path)!r})
        sys.path.append("")
        import late_module
        late_module.FILE.write("abc")
        last = list(sys.modules)[-2]
        assert last in forking.inherited.modules
        del sys.modules[last]
        sys.modules[last] = type(sys)(last)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "held").read_text() == "abc"


OF_THE_TEMPLATE = """
import os, sys, weakref
from distmagic.remote.engine import forking
class Library: pass
library = Library()
weakref.finalize(library, print, "the template's")
def child():
    own = Library()
    weakref.finalize(own, print, "the rank's")
    sys.modules["colours"] = module = type(sys)("colours")
    module.library = own
forking.remember(dict(os.environ), ())
forking.run(lambda: os.waitpid(forking.fork(lambda: forking.exit_like_python(child)), 0))
os._exit(0)
"""


def test_what_the_template_wants_done_at_its_end_is_not_done_at_the_end_of_a_rank():
    done = completed([sys.executable, "-u", "-c", OF_THE_TEMPLATE])
    assert done.stdout == "the rank's\n"


def test_a_stream_that_is_lost_fails_it():
    done = forked("sys.stdout = type('Broken', (), {})()")
    assert done.returncode == 120


@pytest.mark.parametrize(("act", "code", "words"), [
    ("pass", 0, ""),
    ("sys.exit('no data')", 1, "no data\n"),
    ("sys.exit(None)", 0, ""),
    ("sys.exit(256 + 7)", 7, ""),
    ("os._exit(9)", 9, ""),
])  # fmt: skip
def test_its_exit_code_is_that_of_any_program(act, code, words):
    done = forked(act)
    assert (done.returncode, done.stderr) == (code, words)


def test_an_exception_is_shown_as_ever():
    done = forked("1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_what_a_template_is_named_after(monkeypatch, tmp_path):
    def key(**env: str) -> str:
        warm = TemplateRequest(
            owner="ab",
            idle_s=1.0,
            lease_s=1.0,
            env=env,
            defaults={"OMP_NUM_THREADS": "1"},
        )
        return template_client._key(template_client.variables(warm), 0o022, ())

    first = key()
    assert (
        key(
            RANK="3",
            MASTER_ADDR="10.0.0.1",
            GLOO_SOCKET_IFNAME="eth0",
            TORCHELASTIC_RUN_ID="x",
        )
        == first
    )
    assert key(COLOUR="red") != first
    assert key(OMP_NUM_THREADS="4") != first
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = key()
    assert before != first
    (tmp_path / "__pycache__").mkdir()  # the first import of something
    assert key() == before
    (tmp_path / "package").mkdir()  # pip install
    (tmp_path / "package-1.0.dist-info").mkdir()
    installed = key()
    assert installed != before
    os.utime(tmp_path / "package-1.0.dist-info", (0, 0))  # the same version once more
    assert key() != installed


def test_a_relative_pythonpath_is_the_jobs_own():
    assert template_client._can_be_warm({"PYTHONPATH": "/opt/a:/opt/b:"})
    assert not template_client._can_be_warm({"PYTHONPATH": "/opt/a:src"})


def test_what_lightning_noted_as_its_rank_in_the_template_is_that_of_the_rank(
    monkeypatch,
):
    noted = {}
    for name in ("lightning_utilities.core.rank_zero", "torchmetrics.utilities.prints"):
        noted[name] = SimpleNamespace(rank=0)
        module = SimpleNamespace(rank_zero_only=noted[name])
        monkeypatch.setitem(sys.modules, name, module)
    forking.mend_rank({"RANK": "5", "LOCAL_RANK": "1"})
    assert [one.rank for one in noted.values()] == [5, 1]
    unnoted = SimpleNamespace(rank_zero_only=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lightning_utilities.core.rank_zero", unnoted)
    forking.mend_rank({"RANK": "5"})
    assert not hasattr(unnoted.rank_zero_only, "rank")
