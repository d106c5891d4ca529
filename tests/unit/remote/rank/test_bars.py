"""tqdm on a rank: every test is a script of its own in a fresh Python, as a rank is, with nothing drawn on stderr.

Most of these Pythons are forked from one that has loaded what tqdm imports, but not tqdm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.builders.forks import Forks
from tests.lab.waiting import HANG_S

ROOT = REPOSITORY
BEFORE = """
import json, sys
from distmagic.remote.rank import bars, report
POSTED = []
report.post_bar = POSTED.append
bars.install({fallback!r})
"""
AFTER = """
import dataclasses, os
with open(os.environ["POSTED_FILE"], "w") as file:
    json.dump([dataclasses.asdict(bar) for bar in POSTED], file)
"""
BLOCKED = "import sys\nfor name in ('IPython', 'ipywidgets', 'ipykernel'): sys.modules[name] = None\n"
LOADED = """
import asyncio, concurrent.futures.process, concurrent.futures.thread, contextlib, dataclasses, html, json, logging
import multiprocessing.pool, multiprocessing.synchronize, platform, weakref
import csv, datetime, email.message, importlib.metadata, numbers, zipfile  # of tqdm.std and tqdm.utils
from distmagic.remote.rank import bars
assert "tqdm" not in sys.modules
"""
TQDM = "import tqdm, tqdm.auto, tqdm.notebook\n"


@dataclass(frozen=True)
class Seen:
    bars: list[dict]
    out: str
    err: str

    @property
    def last(self) -> dict:
        return self.bars[-1]

    @property
    def closed(self) -> list[dict]:
        return [bar for bar in self.bars if bar["closed"]]


ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def without_tqdm() -> Iterator[Forks]:
    forks = Forks(LOADED, ENV)
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def with_tqdm() -> Iterator[Forks]:
    forks = Forks(LOADED + BLOCKED + TQDM, ENV)
    yield forks
    forks.close()


@pytest.fixture
def rank(tmp_path, request):
    """Run a script as a rank would: tqdm hooked, no terminal, no IPython."""

    def run(
        script: str,
        *,
        first: str = "",
        fallback: str | None = None,
        flags: tuple[str, ...] = (),
        **env: str,
    ) -> Seen:
        posted = tmp_path / "posted.json"
        text = (
            BLOCKED
            + first
            + BEFORE.format(fallback=fallback)
            + textwrap.dedent(script)
            + AFTER
        )
        file = tmp_path / "script.py"
        file.write_text(text)
        env["POSTED_FILE"] = str(posted)
        if flags:
            argv = [sys.executable, *flags, str(file)]
            done = subprocess.run(
                argv,
                check=False,
                capture_output=True,
                timeout=HANG_S,
                env={**ENV, **env},
            )
        else:
            loaded = "with_tqdm" if first == TQDM else "without_tqdm"
            done = request.getfixturevalue(loaded).run(file, env=env)
        assert done.returncode == 0, done.stderr.decode()
        return Seen(
            json.loads(posted.read_text()), done.stdout.decode(), done.stderr.decode()
        )

    return run


LOOPS = {
    "tqdm": "from tqdm import tqdm\nfor _ in tqdm(range(5)): pass",
    "import tqdm": "import tqdm\nfor _ in tqdm.tqdm(range(5)): pass",
    "trange": "from tqdm import trange\nfor _ in trange(5): pass",
    "std": "from tqdm.std import trange\nfor _ in trange(5): pass",
    "auto": "from tqdm.auto import tqdm\nfor _ in tqdm(range(5)): pass",
    "auto trange": "from tqdm.auto import trange\nfor _ in trange(5): pass",
    "autonotebook": "from tqdm.autonotebook import tqdm\nfor _ in tqdm(range(5)): pass",
    "notebook": "from tqdm.notebook import tqdm\nfor _ in tqdm(range(5), display=True, ncols='80%'): pass",
    "notebook module": "import tqdm.notebook\nfor _ in tqdm.notebook.trange(5): pass",
    "tqdm_notebook": "from tqdm.notebook import tqdm_notebook\nfor _ in tqdm_notebook(range(5)): pass",
    "tnrange": "from tqdm.notebook import tnrange\nfor _ in tnrange(5): pass",
    "stdout": "import sys\nfrom tqdm import tqdm\nfor _ in tqdm(range(5), file=sys.stdout): pass",
    "disable=None": "from tqdm import tqdm\nfor _ in tqdm(range(5), disable=None): pass",
    "thread_map": "from tqdm.contrib.concurrent import thread_map\nassert thread_map(abs, range(5)) == list(range(5))",
    "asyncio": """
        import asyncio
        from tqdm.asyncio import tqdm
        async def main():
            async for _ in tqdm(range(5)): pass
        asyncio.run(main())""",
    "gather": """
        import asyncio
        from tqdm.auto import tqdm
        async def one(i): return i
        async def main():
            assert await tqdm.gather(*map(one, range(5))) == list(range(5))
        asyncio.run(main())""",
    "update": """
        from tqdm import tqdm
        with tqdm(total=5) as bar:
            bar.update(2)
            bar.update(3)""",
    "subclass": """
        from tqdm import tqdm
        class Mine(tqdm):
            def display(self, msg=None, pos=None):
                print("mine", self.n)
        for _ in Mine(range(5)): pass""",
    "subclass with super": """
        from tqdm.auto import tqdm
        class Mine(tqdm):
            def display(self, *args, **kwargs):
                return super().display(*args, **kwargs)
        for _ in Mine(range(5)): pass""",
    "subclass with sp": """
        from tqdm.auto import tqdm
        class Mine(tqdm):
            def display(self, msg=None, pos=None):
                self.sp(str(self) if msg is None else msg)
        for _ in Mine(range(5)): pass""",
}


@pytest.mark.parametrize("when", ["tqdm imported after", "tqdm imported before"])
@pytest.mark.parametrize("name", LOOPS)
def test_every_way_to_a_bar_is_picked_up(rank, name, when):
    first = TQDM if when.endswith("before") else ""
    seen = rank(LOOPS[name], first=first)
    assert seen.bars[0]["n"] == 0
    assert not seen.bars[0]["closed"]
    assert (seen.last["n"], seen.last["total"], seen.last["closed"]) == (5, 5, True)
    assert len(seen.closed) == 1
    assert "\r" not in seen.out + seen.err
    if name != "subclass":
        assert (seen.out + seen.err).count("100%|██████████| 5/5 [00:00<00:00,") == 1
        assert seen.err.count("\n") + seen.out.count("\n") == 1


def test_tqdm_is_not_imported_for_those_who_do_not_use_it(rank):
    rank("assert 'tqdm' not in sys.modules")


def test_nested_bars_have_their_own_numbers_outermost_first(rank):
    seen = rank("""
        from tqdm import tqdm, trange
        for _ in trange(2, desc="epoch"):
            for _ in tqdm(range(3), desc="batch", leave=False): pass
    """)
    assert [bar["desc"] for bar in seen.closed] == ["batch", "batch", "epoch"]
    assert len({bar["id"] for bar in seen.bars}) == 3
    assert min(seen.bars, key=lambda bar: bar["id"])["desc"] == "epoch"
    assert seen.err.count("\n") == 1  # leave=False leaves nothing
    assert seen.err.startswith("epoch: 100%|")


def test_description_postfix_unit_and_unknown_total(rank):
    seen = rank("""
        from tqdm import tqdm
        bar = tqdm(desc="read", unit="B", unit_scale=True)
        bar.update(1024)
        bar.set_postfix(loss=0.5, lr="1e-3")
        bar.set_description("wrote")
        bar.close()
    """)
    assert (seen.last["desc"], seen.last["postfix"], seen.last["unit"]) == (
        "wrote",
        "loss=0.5, lr=1e-3",
        "B",
    )
    assert (seen.last["n"], seen.last["total"]) == (1024, None)
    assert seen.last["rate"] > 0
    assert seen.bars[0]["desc"] == "read"


def test_a_unit_scale_that_is_a_number_scales(rank):
    seen = rank(
        "from tqdm import trange\nfor _ in trange(4, unit_scale=32, unit='img'): pass\n"
    )
    assert (seen.last["n"], seen.last["total"]) == (128, 128)


def test_reset_counts_from_the_beginning_in_the_same_bar(rank):
    seen = rank("""
        from tqdm import tqdm
        bar = tqdm(total=3)
        bar.update(3)
        bar.reset(total=5)
        bar.close()
    """)
    assert {bar["id"] for bar in seen.bars} == {seen.last["id"]}
    assert (seen.last["n"], seen.last["total"]) == (0, 5)


def test_a_total_that_is_set_later_and_n_by_hand(rank):
    seen = rank("""
        from tqdm.auto import tqdm
        bar = tqdm(total=float("inf"))
        bar.total = 9
        bar.n = 4
        bar.refresh()
        bar.close()
    """)
    assert [(bar["n"], bar["total"]) for bar in seen.bars] == [
        (0, None),
        (4, 9),
        (4, 9),
    ]


@pytest.mark.parametrize("how", ["disable=True", "delay=60"])
def test_a_silent_bar_stays_silent(rank, how):
    seen = rank(f"from tqdm import tqdm\nfor _ in tqdm(range(5), {how}): pass\n")
    assert (seen.bars, seen.out, seen.err) == ([], "", "")


def test_the_variable_that_silences_tqdm_is_heeded(rank):
    assert (
        rank(
            "from tqdm import trange\nfor _ in trange(3): pass\n", TQDM_DISABLE="1"
        ).bars
        == []
    )


def test_a_bar_with_a_file_of_its_own_is_left_alone(rank):
    seen = rank("""
        import io
        from tqdm import tqdm
        file = io.StringIO()
        for _ in tqdm(range(3), file=file): pass
        assert file.getvalue().startswith("\\r"), file.getvalue()
        assert file.getvalue().count("\\r") >= 2 and file.getvalue().endswith("\\n")
        silent = io.StringIO()
        for _ in tqdm(range(3), file=silent, disable=None): pass
        assert silent.getvalue() == ""
    """)
    assert (seen.bars, seen.err) == ([], "")


def test_a_redirected_stderr_gets_the_last_line(rank):
    seen = rank("""
        import contextlib, io
        from tqdm import trange
        with contextlib.redirect_stderr(io.StringIO()) as file:
            for _ in trange(3): pass
        assert file.getvalue().startswith("100%|"), file.getvalue()
    """)
    assert seen.last["closed"]
    assert seen.err == ""


def test_write_and_logging_print_plain_lines(rank):
    seen = rank("""
        import logging
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        with logging_redirect_tqdm():
            for i in tqdm(range(2), leave=False):
                tqdm.write(f"written {i}")
                logging.info("logged")
    """)
    assert seen.out == "written 0\nwritten 1\n"
    assert seen.err == "logged\nlogged\n"


def test_breaking_off_closes_the_bar_where_it_was(rank):
    seen = rank("""
        from tqdm import tqdm
        bar = tqdm(range(10), miniters=1, mininterval=0)
        for i in bar:
            if i == 4: break
        bar.close()
    """)
    assert (seen.last["n"], seen.last["closed"]) == (4, True)
    assert seen.err.startswith(" 40%|")


def test_a_bar_that_other_threads_draw_while_it_closes_has_one_last_line(rank):
    seen = rank("""
        import threading
        from tqdm import tqdm
        class Shared(tqdm):
            @classmethod
            def _decr_instances(cls, instance):  # `close` calls it when the bar is disabled already
                super()._decr_instances(instance)
                threads = [threading.Thread(target=tqdm.display, args=(instance,)) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        bar = Shared(total=3)
        bar.update(3)
        bar.close()
        bar.display()
        bar.close()""")
    assert seen.err.count("100%") == 1
    assert seen.err.endswith("it/s]\n")
    assert len(seen.closed) == 1


def test_process_pools_work(rank):
    seen = rank("""
        import multiprocessing
        from tqdm.contrib.concurrent import process_map
        multiprocessing.set_start_method("fork")
        assert process_map(abs, range(6), max_workers=2, chunksize=1) == list(range(6))
    """)
    assert (seen.last["n"], seen.last["closed"]) == (6, True)


def test_a_host_without_tqdm_uses_the_one_that_travels(rank, tmp_path):
    tqdm = pytest.importorskip("tqdm")
    shutil.copytree(
        Path(tqdm.__file__).parent, tmp_path / "bundle" / "fallback" / "tqdm"
    )
    archive = shutil.make_archive(str(tmp_path / "bundle"), "zip", tmp_path / "bundle")
    script = "from tqdm.auto import trange\nfor _ in trange(5): pass\nprint(sys.modules['tqdm'].__file__)"
    seen = rank(script, fallback=f"{archive}/fallback", flags=("-S",))
    assert seen.out.startswith(archive)
    assert seen.last["n"] == 5


def test_the_hosts_own_tqdm_comes_first(rank, tmp_path):
    assert rank("assert sys.path[-1] != '/nowhere'", fallback="/nowhere").bars == []


MADE_IN_A_NOTEBOOK = """
import sys, warnings
import cloudpickle
warnings.simplefilter("ignore")
from tqdm import tqdm
from tqdm.notebook import tqdm as notebook_tqdm, trange as notebook_range
import tqdm.auto
def train():
    for _ in notebook_tqdm(range(2), desc="class"): pass
    for _ in notebook_range(2, desc="range"): pass
    for _ in tqdm.auto.trange(2, desc="auto"): pass
class Mine(notebook_tqdm): pass
def subclass():
    for _ in Mine(range(2), desc="subclass"): pass
sys.stdout.buffer.write(cloudpickle.dumps((train, subclass)))
"""


def test_classes_that_were_pickled_in_a_notebook(rank, tmp_path):
    for needed in ("cloudpickle", "ipywidgets"):
        pytest.importorskip(needed)
    kernel = [sys.executable, "-c", MADE_IN_A_NOTEBOOK]
    (tmp_path / "call").write_bytes(
        subprocess.run(kernel, check=True, stdout=subprocess.PIPE).stdout
    )
    seen = rank(f"""
        import pickle
        with open({str(tmp_path / "call")!r}, "rb") as file:
            train, subclass = pickle.load(file)
        train()
        subclass()
    """)
    assert [(bar["desc"], bar["n"]) for bar in seen.closed] == [
        ("class", 2),
        ("range", 2),
        ("auto", 2),
        ("subclass", 2),
    ]


def test_a_bar_that_was_there_before_goes_on_drawing(rank):
    seen = rank(
        "bar.update(2)\nbar.close()\n",
        first="from tqdm import tqdm\nbar = tqdm(total=2)\n",
    )
    assert seen.bars == []
    assert seen.err.count("\r") >= 2
