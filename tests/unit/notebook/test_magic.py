"""The magics in a real IPython shell, with a fake session behind them."""

from __future__ import annotations

import gc
import getpass
import inspect
import json
import linecache
import re
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
from IPython.core.completer import provisionalcompleter
from IPython.utils.capture import capture_output

import distmagic
from distmagic import notebook_place
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.prompts import NotebookAsker, asker_of
from distmagic.errors import (
    AuthenticationError,
    PayloadError,
    PayloadTooLarge,
    UsageError,
    WorkerFailed,
)
from distmagic.notebook import commands, help_pages, local_run, magic
from distmagic.outcome.detached import Detached
from distmagic.payload import pack
from distmagic.playground import playground
from distmagic.playground.playground import Playground
from distmagic.request import flag_parser
from distmagic.request.hosts import parse_hosts
from distmagic.session import dry_run, inside
from distmagic.session.housekeeping import Housekeeping
from distmagic.session.session import Session
from tests.builders.later import Later
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S, wait_until
from tests.unit.notebook.fakes import (
    FakeFirstLinks,
    FakePlayground,
    FakeScreen,
    FakeSession,
    Lab,
)

nbclient, nbformat = Later("nbclient"), Later("nbformat")


def public_methods(kind: type) -> dict[str, list[tuple]]:
    """Return the parameters of each public method: (name, kind, default)."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            parameters = inspect.signature(method).parameters.values()
            found[name] = [(one.name, one.kind, one.default) for one in parameters]
    return found


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (FakeSession, Session),
        (FakeFirstLinks, FirstLinks),
        (FakePlayground, Playground),
    ],
)
def test_the_fakes_have_the_signatures_of_what_they_stand_for(fake, real):
    of_fake, of_real = public_methods(fake), public_methods(real)
    if real is Session:
        of_real |= public_methods(Housekeeping)
    assert of_fake == {name: of_real.get(name) for name in of_fake}


# ---- a cell that runs


def test_statements_run_here_and_the_last_expression_on_ranks(lab):
    assert lab.value("%%distributed\nn = 3\ndef f(x):\n    return x * n\nf(x=n)") == 9
    assert lab.session.log == ["reach", "launch"]
    assert lab.shell.user_ns["_run"] == 9
    assert lab.value("f(5) + n") == 18
    assert lab.session.screen == FakeScreen(lab.shell)
    assert not lab.session.reached[0].cancelled


def test_hosts_are_being_reached_before_the_cells_own_statements_run(lab):
    lab.shell.user_ns["log"] = lab.session.log
    lab.run("%%distributed\nlog.append('local')\nlen([])")
    assert lab.session.log == ["reach", "local", "launch"]


def test_the_assigned_name_gets_the_run(lab):
    lab.value("%%distributed\nx = y = len('four')")
    assert (lab.shell.user_ns["x"], lab.shell.user_ns["y"]) == (4, 4)


def test_an_item_and_an_attribute_get_the_run(lab):
    lab.value("runs = {}\nclass Kept: pass")
    lab.value('%%distributed\nruns["a"] = Kept.last = y = len("four")')
    assert lab.shell.user_ns["runs"] == {"a": 4}
    assert lab.shell.user_ns["Kept"].last == lab.shell.user_ns["y"] == 4
    assert lab.session.variable == "y"
    assert "_run" not in {**lab.shell.user_ns, **lab.shell.user_ns_hidden}


def test_a_run_whose_place_refuses_it_is_the_last_run(lab):
    lab.value("place = ()")
    error = lab.error('%%distributed\nplace["a"] = len("four")')
    assert isinstance(error, TypeError)
    assert lab.shell.user_ns["_run"] == 4
    assert lab.session.variable == "place['a']"


def test_a_place_that_is_nowhere_starts_nothing(lab):
    error = lab.error('%%distributed\nrunz["a"] = len("four")')
    assert error.message.startswith("line 2: runz is not defined")
    assert lab.session.log == []


@pytest.mark.parametrize(
    "cell",
    [
        "# to train\n%%distributed --hosts a\nf()",
        "import os\n%%ranks\nf()",
        "%%distributed --hosts a\n\n%%capture out\nf()",
    ],
)
def test_a_magic_that_does_not_begin_its_cell_says_where_it_stands(lab, cell, golden):
    lab.shell.user_ns["f"] = len
    error = lab.error(cell)
    assert isinstance(error, UsageError)
    golden(error)
    assert lab.session.log == []


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%timeit -n1 -r1"])
def test_a_cell_below_a_magic_that_watches_it_runs(lab, magic):
    lab.value(f"{magic}\n%%distributed -o run\ndef f(x): return x + 1\nf(3)")
    assert lab.shell.user_ns["run"] == 4


@pytest.mark.parametrize("name", ["tools.py", "tools.ipynb"])
def test_a_function_of_a_program_that_run_has_executed_is_called(lab, name, tmp_path):
    text = "STEP = 3\ndef advanced(x): return x + STEP"
    cells = [{"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}]  # fmt: skip
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    file = tmp_path / name
    file.write_text(text if name == "tools.py" else json.dumps(book))
    lab.value(f"%run {file}")
    lab.value("%%distributed -o run\nadvanced(4)")
    assert lab.shell.user_ns["run"] == 7


@pytest.mark.parametrize(
    "cell", ["%%distributed -o run\nf()", "%%distributed\nrun = f()"]
)
def test_a_run_that_has_a_name_is_let_go_of_with_that_name(lab, cell):
    lab.value("class Value: pass\ndef f(): return Value()")
    assert lab.value(cell) is None
    run = weakref.ref(lab.shell.user_ns["run"])
    lab.value("del run")
    gc.collect()
    assert run() is None, "neither Out nor _run has any of it"


def test_a_name_whose_object_is_of_no_module_becomes_the_run(lab):
    lab.value("class Odd: __module__ = None\nrun = Odd()")
    lab.value("%%distributed -o run\nlen('four')")
    assert lab.shell.user_ns["run"] == 4


def test_a_run_without_a_name_is_the_last_run_until_the_next_one(lab):
    lab.value("%%distributed\nlen('four')")
    assert lab.shell.user_ns["_run"] == 4
    lab.value("%%distributed -o run\nlen([])")
    assert "_run" not in {**lab.shell.user_ns, **lab.shell.user_ns_hidden}


def test_the_line_becomes_spec_access_and_hosts(lab):
    lab.value("n = 2")
    lab.value(
        "%%distributed --hosts gpu-a:4,gpu-b --nproc-per-node {n} --lease 5 --payload-limit 1M\nlen([])"
    )
    assert lab.session.hosts == parse_hosts("gpu-a:4,gpu-b")
    assert lab.session.spec.nproc_per_node == 2
    assert lab.session.access.lease_s == 5
    assert lab.packed["limit_bytes"] == 2**20


def test_ranks_a_host_on_the_line_win_over_those_set_before(lab):
    lab.value("%distributed hosts gpu-a:4 gpu-b")
    lab.value("%%distributed --nproc-per-node 2\nlen([])")
    assert (lab.session.hosts, lab.session.spec.nproc_per_node) == (
        parse_hosts("gpu-a gpu-b"),
        2,
    )
    lab.value("%%distributed\nlen([])")
    assert lab.session.hosts == parse_hosts("gpu-a:4 gpu-b")


def test_ipythons_syntax_works_in_the_notebooks_part(lab):
    assert (
        lab.value("%%distributed\nwords = !echo one two\n%time x = 1\nlen(words)") == 1
    )


def test_whole_runs_nothing_here(lab):
    text = lab.value("%%distributed --whole\nimport not_a_module\nx = 1\n")
    assert text == "#%%distributed\nimport not_a_module\nx = 1\n"
    assert "x" not in lab.shell.user_ns
    assert lab.packed["labels"][lab.packed["filename"]] == "Cell In[1]"


def test_the_payload_is_picklable_and_knows_its_cells(lab):
    lab.value("def other():\n    return 5")
    lab.value("%%distributed\ndef f():\n    return other()\n\nf()")
    thunk = lab.session.payload
    filename = thunk.__code__.co_filename
    labels = lab.packed["labels"]
    assert labels[filename] == "Cell In[2]"
    assert labels[lab.shell.user_ns["other"].__code__.co_filename] == "Cell In[1]"
    assert linecache.getline(filename, 5) == "f()\n"
    assert thunk.__code__.co_firstlineno == 5
    assert cloudpickle.loads(cloudpickle.dumps(thunk))() == 5


def test_dry_run_prints_and_executes_nothing(lab, capsys):
    lab.value("%%distributed --dry-run --nproc-per-node 3\nx = 1\nlen([])")
    assert capsys.readouterr().out == "would run 3\n"
    assert "x" not in lab.shell.user_ns
    assert lab.session.log == ["reach", "dry_run"]


def test_what_hosts_told_is_no_escape_sequence_in_a_dry_run(lab, capsys, monkeypatch):
    text = "# gpu-a\n\x1b]52;c;AAAA\x07/usr/bin/\x1b[2Jpython"
    monkeypatch.setattr(dry_run, "start_commands", lambda *_: text)
    lab.value("%%distributed --dry-run\nlen([])")
    assert capsys.readouterr().out == "# gpu-a\n/usr/bin/python\n"


def test_help_is_printed(lab, capsys):
    lab.value("%%distributed --help\nx")
    assert capsys.readouterr().out.startswith("usage: %%distributed")
    assert lab.session.log == []


@pytest.mark.parametrize("name", commands.NAMES)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_behind_a_subcommand_is_its_usage(lab, capsys, name, flag):
    lab.value(f"%distributed {name} {flag}")
    text = capsys.readouterr().out
    assert f"%distributed {name}" in text
    assert lab.session.log == []
    if name == "run":
        assert "--nproc-per-node" in text
    else:
        (command,) = (one for one in commands.SUBCOMMANDS if one.name == name)
        assert len(text.splitlines()) == len(command.usages)


# ---- a cell that fails


def test_a_failing_statement_fails_the_cell_with_the_usual_traceback(lab, capsys):
    error = lab.error("%%distributed\n\ndef g():\n    1 / 0\n\ng()\nord('a')")
    assert isinstance(error, ZeroDivisionError)
    shown = capsys.readouterr().out
    assert "Cell In[1], line 6\n" in shown
    assert "----> 4     1 / 0" in shown
    assert "magic.py" not in shown
    assert lab.session.log == ["reach"]
    assert lab.session.reached[0].cancelled


def test_a_module_that_only_hosts_have_recommends_whole(lab, capsys):
    assert isinstance(
        lab.error("%%distributed\nimport not_a_module\nlen([])"), ModuleNotFoundError
    )
    printed = capsys.readouterr()
    assert local_run._WHOLE_NOTE in printed.out + printed.err


def test_what_acts_in_the_notebook_alone_is_told_once_it_has_run(
    lab, capsys, monkeypatch, golden
):
    monkeypatch.setenv("LOCAL_RANK", "0")
    cell = "import os\nrank = int(os.environ['LOCAL_RANK'])\ndef f():\n    return rank\nf()"
    assert lab.value(f"%%distributed\n{cell}") == 0
    golden(capsys.readouterr().out)
    lab.value(f"%%distributed --whole\n{cell}")
    assert "!" not in capsys.readouterr().out


def test_a_library_that_the_notebook_has_changed_is_told_of_once_where_the_call_uses_it(
    lab, capsys, monkeypatch, golden
):
    monkeypatch.setattr(json, "BATCH", 0, raising=False)
    lab.run("import json\njson.BATCH = 512")
    call = "%%distributed\ndef f():\n    return json.BATCH\nf()"
    lab.run(call)
    assert "!" not in capsys.readouterr().out
    lab.uses = {"json"}
    lab.run(call)
    golden(capsys.readouterr().out)
    lab.run(call)
    assert "!" not in capsys.readouterr().out
    lab.run(call.replace("json\n", "json\njson.BATCH = 3\n", 1))
    lab.run("%%distributed\njson.BATCH = 3\nf()")
    assert "! Line 2 sets json.BATCH" in capsys.readouterr().out
    lab.run(call)
    assert "!" not in capsys.readouterr().out


def test_a_variable_that_another_cell_has_set_is_told_of_once(
    lab, capsys, monkeypatch, golden
):
    monkeypatch.setenv("DM_TEST_WORD", "")
    lab.run("import os\nos.environ['DM_TEST_WORD'] = 'a'")
    lab.run("%%distributed --env DM_TEST_WORD=a\nlen([])")
    assert "!" not in capsys.readouterr().out
    lab.run("%%distributed\nlen([])")
    golden(capsys.readouterr().out)
    lab.run("%%distributed\nlen([])")
    lab.run("%%distributed --whole\nimport os\nos.environ['DM_TEST_WORD'] = 'b'")
    lab.run("%%distributed\nos.environ['DM_TEST_WORD'] = 'c'\nlen([])")
    capsys.readouterr()
    lab.run("%%distributed\nlen([])")
    assert "!" not in capsys.readouterr().out


def test_a_variable_of_the_line_is_not_told_to_be_the_notebooks_alone(
    lab, capsys, golden
):
    cell = "import os\nos.environ['DM_TEST_WORD'] = 'a'\nlen([])"
    lab.value(f"%%distributed --env DM_TEST_WORD=a\n{cell}")
    assert capsys.readouterr().out == "Out[1]: 0\n"
    lab.value(f"%%distributed\n{cell}\ndel os.environ['DM_TEST_WORD']\nlen([])")
    golden(capsys.readouterr().out)


NO_RANK = (
    "This statement ran in the notebook, which is not a rank. Move it into the function, or write %%distributed --whole, and "
    "every rank runs the whole cell."
)


@pytest.mark.parametrize(
    ("statement", "kind", "has_note"),
    [
        ("rank = int(os.environ['LOCAL_RANK'])", KeyError, True),
        ("rank = int(os.environ.get('LOCAL_RANK'))", TypeError, True),
        ("epochs = int(sys.argv[99])", IndexError, True),
        ("def setup():\n    return os.environ['RANK']\nsetup()", KeyError, True),
        ("raise ValueError('environment variable RANK expected, but not set')", ValueError, True),
        ("raise KeyError('RANKS')", KeyError, False),
        ("raise ValueError('no')", ValueError, False),
        ("sys.exit('no data')", SystemExit, True),
    ],
)  # fmt: skip
def test_an_error_of_a_statement_that_was_meant_for_a_rank_says_where_it_ran(
    lab, capsys, monkeypatch, statement, kind, has_note
):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    error = lab.error(f"%%distributed\nimport os, sys\n{statement}\nord('a')")
    assert isinstance(error, kind)
    printed = capsys.readouterr()
    assert (NO_RANK in printed.out + printed.err) == has_note
    assert lab.session.reached[0].cancelled


def test_argparse_that_ends_the_cell_is_an_error_that_says_where_it_ran(
    lab, capsys, monkeypatch, golden
):
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    error = lab.error(
        "%%distributed\nimport argparse\nparser = argparse.ArgumentParser()\nargs = parser.parse_args()\nlen([])"
    )
    assert isinstance(error, UsageError)
    golden(error)
    assert lab.session.reached[0].cancelled


def test_a_syntax_error_looks_as_in_any_cell(lab, capsys, golden):
    error = lab.error("%%distributed\nx = 1\ny = = 2\nlen([])")
    assert isinstance(error, UsageError)
    assert error.message == "line 3: invalid syntax"
    golden(capsys.readouterr().out.rstrip())
    assert lab.session.log == []


@pytest.mark.parametrize(
    "cell",
    [
        "%%distributed\n\n\n",
        "%%distributed --nproc-per-node 0\nf()",
        "%%distributed --nproc-per-node -1\nf()",
        "%%distributed --hosts a:0\nf()",
        "%%distributed --hots a\nf()",
        "%%distributed\n!ls",
        "%%distributed --hosts a --python b=/x\nf()",
        "%%distributed\ndef a(): pass\ndef b(): pass",
        "%%distributed\nfor i in range(3):\n    data.append(i)",
    ],
)  # fmt: skip
def test_a_wrong_request_starts_nothing(lab, cell, golden):
    lab.shell.user_ns.update(data=[], f=len)
    error = lab.error(cell)
    assert isinstance(error, UsageError)
    golden(error)
    assert lab.session.log == []


@pytest.mark.parametrize(
    ("lines", "is_refused"),
    [
        ("from transformers import Trainer\ntr = Trainer()", True),
        ("from transformers import Trainer as T\ntr = T()", True),
        ("import lightning as L\ntr = L.Trainer()", True),
        ("import torch.nn.parallel\ntr = torch.nn.parallel.DistributedDataParallel(1)", True),
        ("import accelerate\ntr = accelerate.Accelerator()", True),
        ("from mingpt.trainer import Trainer\ntr = Trainer()", False),
        ("class Trainer: pass\ntr = Trainer()", False),
        ("from transformers import Trainer\nother = Trainer()\ntr = []", False),
    ],
)  # fmt: skip
def test_what_each_rank_has_to_make_is_refused_before_a_line_has_run(
    lab, lines, is_refused
):
    before = "began = 1"
    error = lab.error(f"%%distributed\n{before}\nraise ValueError\n{lines}\nrepr(tr)")
    assert isinstance(error, UsageError if is_refused else ValueError)
    assert ("began" in lab.shell.user_ns) != is_refused
    if is_refused:
        assert "`tr`" in error.message
        assert "nothing has run" in error.message
        assert "--whole" in error.hint


def test_what_each_rank_has_to_make_is_seen_beside_what_may_not_be_evaluated(lab):
    lines = "import accelerate\ntr = accelerate.Accelerator()\nprint(tr, 1 or 2)"
    error = lab.error(f"%%distributed\nraise ValueError\n{lines}")
    assert "nothing has run" in str(error)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("def fit(n): return n\nfitt(3)", ("fitt is not defined", "Did you mean fit?")),
        ("import json as js\njs.dumps(steps)", ("steps is not defined", "")),
        ("run = abs(lr + 1)", ("lr is not defined", "")),
        ("async def fit(): pass\nawait fitt()", ("fitt is not defined", "Did you mean fit?")),
        ("print([x for x in rows])", ("rows is not defined", "")),
        ("def fit(n, lr): return n\nlr = 0\nfitt(3, lr=lr or 1e-3)", ("fitt is not defined", "Did you mean fit?")),
        ("abs(lr or 1)", ("lr is not defined", "")),
        ("abs(1 if lr else 2)", ("lr is not defined", "")),
    ],
)  # fmt: skip
def test_a_name_of_the_call_that_is_nowhere_fails_here_and_asks_no_host(
    lab, cell, words
):
    error = lab.error(f"%%distributed -o run\n{cell}")
    assert isinstance(error, UsageError)
    message, hint = words
    assert error.message.startswith(f"line {cell.count(chr(10)) + 2}: {message}")
    assert error.hint == hint
    assert lab.session.log == []


@pytest.mark.parametrize(
    "call",
    [
        "train()",
        "run = train(1, 2, 3)",
        "train(1, lr=0.1, epochz=3)",
        "await load(1)",
    ],
)
def test_arguments_that_do_not_fit_fail_here_and_start_nothing(lab, call, golden):
    lab.value("def train(model, *, lr=0.1): pass\nasync def load(): pass")
    error = lab.error(f"%%distributed\n{call}")
    assert isinstance(error, UsageError)
    golden(error)
    assert "launch" not in lab.session.log


@pytest.mark.parametrize(
    "call",
    ["train(*args)", "train(**kw)", "wrapped(1)", "Kind(1)", "(lambda n: n)(1)"],
)
def test_arguments_that_may_fit_are_left_to_python(lab, call):
    lab.value(
        "import functools\nargs, kw = (1,), {'n': 1}\ndef train(n): return n\n"
        "class Kind:\n    def __init__(self, n): self.n = n\n"
        "@functools.wraps(lambda: 0)\ndef wrapped(n): return n"
    )
    lab.value(f"%%distributed\n{call}")
    assert lab.session.log[-1] == "launch"


def test_a_name_of_the_call_that_is_nowhere_fails_before_the_cells_own_lines_run(lab):
    cell = "began = 1\nfor n in range_of:\n    began += n\nfitt(began)"
    lab.shell.user_ns["range_of"] = [1, 2]
    assert "fitt is not defined" in str(lab.error(f"%%distributed\n{cell}"))
    assert "began" not in lab.shell.user_ns


def test_a_name_that_the_cells_own_lines_might_have_made_is_looked_for_once_they_have_run(
    lab,
):
    error = lab.error("%%distributed\nimport math\nhalf = math.sqrt(4)\nlen(halff)")
    assert "Did you mean half?" in str(error)
    assert isinstance(lab.error("%%distributed\nn = 1\ndel n\nabs(n)"), UsageError)
    assert "launch" not in lab.session.log
    assert all(reaching.cancelled for reaching in lab.session.reached)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("globals()['made'] = 1\nabs(made)", 1),
        ("abs(2 or nowhere)", 2),
        ("abs(2 if True else nowhere)", 2),
        ("max(True and (n := 3), n)", 3),
        ("exec('made = 2')\nabs(made)", 2),
        ("from math import *\nfloor(sqrt(4))", 2),
        ("def make():\n    global made\n    made = 3\nmake()\nint.__abs__(made)", 3),
        ("for n in [4]: pass\nabs(n)", 4),
        ("sum([x for x in (1, 2)]) + (lambda y: y)(2)", 5),
        ("sum(x * y for x in (1, 2) for y in (x,))", 5),
        ("abs((z := 3) + z)", 6),
        ("try:\n    import nothing_such as m\nexcept ImportError as e: m = 7\nabs(m)", 7),
        ("match 8:\n    case m: pass\nabs(m)", 8),
        ("print(__name__)", None),
        ("def fit():\n    return helper_\ntry:\n    fit()\nexcept NameError:\n    helper_ = 13\nfit()", 13),
        ("def only():\n    return 9", 9),
        ("if __name__ == '__main__':\n    abs(10)", 10),
        ("11 if True else nothing_such(int())", 11),
        ("bool(12) or nothing_such()", True),
    ],
)  # fmt: skip
def test_a_name_that_is_somewhere_is_no_error(lab, cell, value):
    assert lab.value(f"%%distributed\n{cell}") == value


def test_an_unpicklable_call_lets_go_of_the_hosts(lab, monkeypatch):
    def refuse(thunk, **given):
        raise PayloadError("lock can't travel")

    monkeypatch.setattr(pack, "pack_call", refuse)
    assert isinstance(lab.error("%%distributed\nlen([])"), PayloadError)
    assert lab.session.reached[0].cancelled


def test_a_failed_run_fails_the_cell_and_is_bound_all_the_same(lab, capsys):
    lab.session.failure = WorkerFailed("rank 1 raised", "look", "Traceback on gpu-b")
    lab.session.failure.run = "the run so far"
    assert lab.error("%%distributed -o run\nx = len([])") is lab.session.failure
    assert (lab.shell.user_ns["run"], lab.shell.user_ns["x"]) == (
        "the run so far",
        "the run so far",
    )
    assert capsys.readouterr().out == "WorkerFailed: rank 1 raised\nlook\n"


def test_the_older_run_can_be_used_until_the_new_one_has_its_name(lab):
    lab.shell.user_ns["run"] = Detached(
        "j-1", ("gpu-a",), attach=lambda: None, stop=lambda: None
    )
    lab.value("%%distributed -o run\nname = run.job\nlen(name)")
    assert lab.shell.user_ns["run"] == 3


@pytest.mark.parametrize(("flags", "name"), [("", "_run"), ("-o mine", "mine")])
def test_messages_about_a_run_name_the_variable_that_has_it(lab, flags, name):
    lab.value("%%distributed -o older\nlen([])")
    lab.session.failure = WorkerFailed("rank 1 raised")
    lab.session.failure.run = "the run so far"
    lab.error(f"%%distributed {flags}\nlen([])")
    assert lab.session.variable == name
    assert lab.shell.user_ns[name] == "the run so far"


# ---- the notebook's settings


def test_hosts_are_set_and_shown(lab, capsys, tmp_path):
    (tmp_path / "my hosts").write_text("gpu-c slots=2\n")
    lab.value("%distributed hosts gpu-a:4, me@gpu-b:2222:2 fe80::1")
    lab.value("%distributed hosts")
    lab.value(f"%distributed hosts --hostfile '{tmp_path}/my hosts'")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["gpu-a:4, me@gpu-b:2222:2, fe80::1  (%distributed hosts)"] * 2
    assert shown[2] == f"gpu-c:2  (%distributed hosts --hostfile {tmp_path}/my hosts)"
    lab.value("%%distributed\nlen([])")
    assert lab.session.hosts == parse_hosts("gpu-c:2")


def test_hosts_are_set_with_their_python_and_ssh_configuration(
    lab, capsys, tmp_path, golden
):
    """For cells, for `distmagic.run`, and for all commands about jobs."""
    line = "%distributed hosts gpu-a:4 gpu-b --python /p --python gpu-b=/q --ssh-config"
    lab.value(f"{line} '{tmp_path}/my config'")
    assert capsys.readouterr().out == (
        "gpu-a:4, gpu-b  (%distributed hosts)"
        f"  --python /p --python gpu-b=/q --ssh-config {tmp_path}/my config\n"
    )
    for what in ("%%distributed\nlen([])", "%distributed jobs"):
        lab.value(what)
        assert lab.session.hosts == parse_hosts("gpu-a:4 gpu-b")
        access = lab.session.access
        assert (access.python_of("gpu-a"), access.python_of("gpu-b")) == ("/p", "/q")
        assert access.ssh_config == f"{tmp_path}/my config"
    hosts, access = notebook_place.current()
    assert hosts == parse_hosts("gpu-a:4 gpu-b")
    assert access.ssh_config == f"{tmp_path}/my config"
    lab.value("%distributed hosts --python /r")  # the hosts stay
    assert capsys.readouterr().out.endswith(f"\ngpu-a:4, gpu-b  (%distributed hosts)  --python /r --python gpu-b=/q --ssh-config {tmp_path}/my config\n")  # fmt: skip
    error = lab.error("%distributed hosts gpu-c --hostfile x")
    golden(error)
    assert lab.error("%distributed hosts gpu-c --nnodes 2").message == (
        "'--nnodes' names no hosts."
    )
    assert lab.value("%%distributed\nlen([])") == 0
    assert lab.session.hosts == parse_hosts("gpu-a:4 gpu-b"), "as before"


def test_a_setting_of_a_wrong_kind(lab, golden):
    lab.value("%unload_ext distmagic")
    lab.shell.config.Distmagic.hosts = 5
    try:
        error = lab.error("%load_ext distmagic")
    finally:
        del lab.shell.config["Distmagic"]
    assert isinstance(error, UsageError)
    assert "The 'hosts' trait" in error.message
    golden(error.hint)


def test_playground_sets_hosts_and_the_way_to_them(lab, capsys, golden):
    lab.value("%distributed playground 2")
    (own,) = lab.playgrounds
    lab.value("%%distributed\nlen([])")
    assert (lab.session.hosts, lab.session.access.ssh_config) == (
        own.hosts,
        "/play/config",
    )
    lab.value("%%distributed --hosts play-1:4\nlen([])")
    assert lab.session.access.ssh_config == "/play/config"
    lab.value("%%distributed --hosts gpu-a\nlen([])")
    assert lab.session.access.ssh_config is None
    lab.value("%%distributed --ssh-config mine\nlen([])")
    assert lab.session.access.ssh_config == "mine"
    lab.value("%distributed playground stop")
    assert own.stopped
    assert lab.session.log[-1] == "close"
    lab.value("%distributed hosts")
    golden(capsys.readouterr().out.splitlines()[-1])


def test_a_second_playground_ends_the_first(lab):
    lab.value("%distributed playground 1")
    lab.value("%distributed playground 2")
    assert [each.stopped for each in lab.playgrounds] == [True, False]


def test_a_kept_playground_outlives_its_kernel_and_is_found_again(lab, monkeypatch):
    lab.value("%distributed playground 2 --keep")
    (own,) = lab.playgrounds
    lab.value("%unload_ext distmagic")
    assert not own.stopped
    monkeypatch.setattr(playground, "found", lambda: own)
    lab.load()
    lab.value("%distributed playground")
    lab.value("%%distributed\nlen([])")
    assert lab.session.hosts == own.hosts
    lab.value("%distributed playground 2 --keep")
    assert (lab.playgrounds, own.stopped) == ([own], False), "the same once more"
    lab.value("%distributed playground 3 --keep")
    assert [each.stopped for each in lab.playgrounds] == [True, False]
    lab.value("%distributed playground stop")
    assert lab.playgrounds[1].stopped


def test_keep_takes_the_kept_playground_that_runs_and_else_starts_one(lab, monkeypatch):
    lab.value("%distributed playground 1")
    kept = lab.playground(2, keep=True)  # an earlier kernel's
    monkeypatch.setattr(playground, "found", lambda: kept)
    lab.value("%distributed playground 2 --keep")
    assert [each.stopped for each in lab.playgrounds] == [True, False]
    monkeypatch.setattr(playground, "found", lambda: None)  # it has ended
    lab.value("%distributed playground 2 --keep")
    assert len(lab.playgrounds) == 3


def test_hosts_of_a_playground_are_shown_and_meet_faults(lab, capsys, golden):
    lab.value("%distributed playground 2")
    capsys.readouterr()
    lab.value("%distributed playground")
    lab.value("%distributed playground freeze play-1")
    golden(capsys.readouterr().out)
    (own,) = lab.playgrounds
    assert own.ordered == [(), ("freeze", "play-1")]
    golden(lab.error("%distributed playground freeze gpu-a"))
    golden(lab.error("%distributed playground melt play-1"))


def test_hosts_of_the_environment_win_over_a_playground(
    lab, capsys, monkeypatch, golden
):
    """Notebooks of the course run unchanged on real hosts."""
    monkeypatch.setenv("DISTMAGIC_HOSTS", "gpu-a:4,gpu-b:2")
    lab.value("%distributed playground 2")
    golden(capsys.readouterr().out)
    assert lab.playgrounds == []
    lab.value("%%distributed\nlen([])")
    assert lab.session.hosts == parse_hosts("gpu-a:4,gpu-b:2")


def test_down_closes_the_session_once_opened(lab, capsys):
    lab.value("%distributed down")
    assert lab.session.log == []
    lab.value("%%distributed\nlen([])")
    capsys.readouterr()
    lab.value("%distributed down")
    assert lab.session.log[-1] == "down"
    assert capsys.readouterr().out == ""


def test_down_names_the_hosts_that_could_not_be_told(lab, capsys, golden):
    lab.session.untold = ("gpu-a", "gpu-b")
    lab.value("%%distributed\nlen([])")
    capsys.readouterr()
    lab.value("%distributed down")
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    [
        "host gpu-a",
        "doctr",
        "--hosts gpu-a",
        "hosts a:0",
        "hosts --file x",
        "playground",
        "playground 0",
        "down now",
    ],
)
def test_a_wrong_command_says_what_to_write(lab, line, golden):
    golden(lab.error(f"%distributed {line}"))


def test_help_lists_the_commands_and_the_flags(lab, capsys):
    lab.value("%distributed --help")
    out = capsys.readouterr().out
    assert "%distributed playground N " in out
    assert "--nproc-per-node N" in out


def test_help_lists_its_topics_and_shows_one(lab, capsys):
    lab.value("%distributed help")
    assert re.search(
        r"^%distributed help flags +\w", capsys.readouterr().out, re.MULTILINE
    )
    with capture_output() as shown:
        lab.value("%distributed help flags")
    (output,) = shown.outputs
    assert output.data["text/markdown"] == output.data["text/plain"]
    assert output.data["text/plain"].startswith("# ")
    lab.value("%distributed help flags")
    assert capsys.readouterr().out.startswith("# "), "as text in a terminal"


def test_words_that_the_manual_does_not_have_name_all_topics(lab, golden):
    error = lab.error("%distributed help zzxyq")
    assert isinstance(error, UsageError)
    golden(error)


def test_help_takes_a_message_as_it_is(lab, capsys):
    lab.value("%distributed help gpu-a: can't write to /data: it's 'full. # 1")
    first = capsys.readouterr().out.split("More:")[0]
    assert "`can't write to ...`" in first


def test_help_with_words_shows_the_three_best_passages(lab, capsys):
    lab.value("%distributed help wait for devices")
    shown = capsys.readouterr().out
    assert shown.startswith("### When devices are taken\n")
    assert shown.count("More: `%distributed help ") == 3


def test_a_link_between_pages_becomes_a_command(monkeypatch, tmp_path, golden):
    (tmp_path / "help").mkdir()
    (tmp_path / "help" / "one.md").write_text(
        "# One\nSee [the second page](two.md#part), [outside](https://x.org/a.md)."
    )
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    golden(help_pages.page("one"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%distributed help fl", "flags"),
        ("%%distributed --dry", "--dry-run"),
        ("%%distmagic --nproc", "--nproc-per-node"),
        ("%%distributed --hosts gp", "gpu-a"),
        ("%distributed pl", "playground"),
        ("%distmagic hosts gp", "gpu-a"),
    ],
)
def test_tab_completes(lab, line, found, monkeypatch):
    lab.value("%distributed hosts gpu-a")
    fake = SimpleNamespace(host_names=lambda path: ("gpu-alias",))
    monkeypatch.setitem(sys.modules, "distmagic.transports.ssh.config", fake)
    with provisionalcompleter():
        completions = lab.shell.Completer.completions(f"{line}\nf()", len(line))
        assert found in [each.text for each in completions]


def completions(lab, line: str) -> list[str]:
    with provisionalcompleter():
        found = lab.shell.Completer.completions(f"{line}\nf()", len(line))
        return [each.text for each in found]


def test_tab_offers_nothing_of_pythons_beside_flags(lab):
    found = completions(lab, "%%distributed --")
    assert set(found) <= set(flag_parser.flag_names())
    assert "--nproc-per-node" in found
    assert "--__build_class__" not in found
    lab.shell.user_ns["nprocs"] = 4
    assert completions(lab, "nproc") == ["nprocs"], "elsewhere it is as it was"
    assert "flags" not in completions(lab, "x = 3; fl")


def test_tab_offers_the_jobs_of_this_kernel(lab):
    assert completions(lab, "%distributed stop 11") == []
    lab.value("%%distributed\nlen([])")
    lab.session.begun = ("1122-1-b", "1122-0-a")
    for command in ("stop", "attach", "logs", "stacks", "add", "clean"):
        assert completions(lab, f"%distributed {command} 11") == ["1122-1-b", "1122-0-a"]  # fmt: skip


def test_a_function_that_is_run_from_python_gets_the_hosts_of_the_notebook(lab):
    lab.value("%distributed hosts gpu-a:4")
    place = notebook_place.current()
    assert [(host.name, host.slots) for host in place[0]] == [("gpu-a", 4)]
    magic.unload_ipython_extension(lab.shell)
    assert notebook_place.current() != place


def test_tab_offers_nothing_of_ours_when_it_is_unloaded(lab):
    magic.unload_ipython_extension(lab.shell)
    assert "--nproc-per-node" not in completions(lab, "%%distributed --")


# ---- loading


def test_another_owner_keeps_its_magic(shell, capsys, monkeypatch, golden):
    def theirs(line, cell):
        return "theirs"

    theirs.__module__ = "other_extension.magics"
    shell.register_magic_function(theirs, "cell", "distributed")
    lab = Lab(shell, monkeypatch)
    golden(capsys.readouterr().out)
    assert lab.value("%%distributed\nx") == "theirs"
    assert lab.value("%%distmagic\nlen('abc')") == 3
    magic.unload_ipython_extension(shell)
    assert lab.value("%%distributed\nx") == "theirs"


def test_unloading_takes_everything_back(lab):
    lab.value("%distributed playground 1")
    lab.value("%%distributed\nlen([])")
    magic.unload_ipython_extension(lab.shell)
    assert lab.session.log[-1] == "close"
    assert lab.playgrounds[0].stopped
    assert lab.shell.find_cell_magic("distributed") is None
    assert lab.shell.find_line_magic("distmagic") is None
    assert lab.shell.find_line_magic("%distmagic") is None
    assert not [
        each for each in lab.shell.configurables if type(each).__name__ == "Distmagic"
    ]
    lab.load()
    assert lab.value("%%distributed\nlen([])") == 0


def test_windows_is_refused_with_a_sentence(shell, monkeypatch, golden):
    monkeypatch.setattr(sys, "platform", "win32")
    with golden.raises(UsageError):
        magic.load_ipython_extension(shell)
    with golden.raises(UsageError):
        distmagic.run(len, [])


@pytest.fixture
def importable(monkeypatch):
    """Let other interpreters find this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(Path(distmagic.__file__).parents[1]))


@pytest.mark.usefixtures("importable")
def test_load_ext_imports_nothing_heavy():
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell as S; s = S.instance()\n"
        "s.run_line_magic('load_ext', 'distmagic'); s.run_line_magic('distributed', 'hosts gpu-a')\n"
        "print([m for m in ('torch', 'paramiko', 'ipywidgets', 'anywidget', 'cloudpickle', 'numpy') if m in sys.modules])\n"
    )
    out = completed([sys.executable, "-c", code])
    assert out.stdout.splitlines()[-1] == "[]", out.stderr


def test_the_package_alone_imports_only_the_standard_library(tmp_path):
    travels = tmp_path / "distmagic"
    travels.mkdir()
    (travels / "__init__.py").write_text(Path(distmagic.__file__).read_text())
    code = (
        "import sys; before = set(sys.modules); import distmagic\n"
        "print(distmagic.__version__, sorted({m.split('.')[0] for m in set(sys.modules) - before"
        " if m.split('.')[0] not in sys.stdlib_module_names}))"
    )
    done = completed([sys.executable, "-S", "-c", code], cwd=tmp_path)
    assert done.stdout == f"{distmagic.__version__} ['distmagic']\n"


def test_the_packages_names_are_found_when_asked_for(golden):
    assert distmagic.UsageError is UsageError
    assert {"run", "Run", "report", "track", "WorkerFailed"} <= set(dir(distmagic))
    with golden.raises(AttributeError):
        _ = distmagic.runn


def test_every_error_is_exported():
    from distmagic import errors

    ours = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert ours == set(distmagic._ERRORS)


# ---- in a kernel

_IN_A_KERNEL = """
from distmagic import api
from distmagic.notebook import magic
from distmagic.payload import pack as packing
from distmagic.connection.prompts import asker_of
from distmagic.connection.link_opener import Fleet
from distmagic.request.hosts import LOCALHOST
from distmagic.session.inside import Inside

class Session:
    futures = ()
    inside = Inside("k", None)
    def reach(self, hosts, access, asker, spec=None, spare=()):
        self.fleet = Fleet(hosts=(LOCALHOST,), access=access)
        return self
    def cancel(self): print("cancelled")
    def launch(self, first_links, spec, payload, screen, job, variable, companion): return payload()

def pack(thunk, **given):
    thunk.uses = ()
    return thunk

packing.pack_call = pack
api.session = Session
magic.load_ipython_extension(get_ipython())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_a_kernel_shows_the_cells_lines_and_its_cell_fails():
    cells = [
        _IN_A_KERNEL,
        "%%distributed\nlen('abc')",
        "%%distributed\n\ndef f():\n    1 / 0\n\nf()\nord('a')",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells]
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(
            notebook, timeout=HANG_S, kernel_name="python3"
        ).execute()
    assert notebook.cells[1].outputs[-1].data["text/plain"] == "3"
    # A line shows that the cell's own lines run, if they take long.
    *running, cancelled, error = notebook.cells[2].outputs
    assert {one.output_type for one in running} <= {"display_data"}
    assert cancelled.text == "cancelled\n"
    assert error.ename == "ZeroDivisionError"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert "Cell In[3], line 6" in plain
    assert "Cell In[3], line 4, in f()" in plain
    assert "magic.py" not in plain


# ---- questions


def _asked_by_a_thread(
    asker: NotebookAsker, **question
) -> tuple[threading.Thread, list]:
    answers: list = []

    def work() -> None:
        try:
            answers.append(asker.ask(**question))
        except AuthenticationError as error:
            answers.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


def test_the_main_thread_asks_what_a_worker_wants_to_know(monkeypatch):
    monkeypatch.setattr(getpass, "getpass", lambda prompt: f"secret for {prompt}")
    monkeypatch.setattr("builtins.input", lambda prompt: f"typed for {prompt}")
    asker = NotebookAsker(can_ask=True)
    for secret, answer in (
        (True, "secret for gpu-a: Code: "),
        (False, "typed for gpu-a: Code: "),
    ):
        thread, answers = _asked_by_a_thread(
            asker, prompt="gpu-a: Code: ", secret=secret
        )
        asker.serve(HANG_S)
        thread.join(HANG_S)
        assert answers == [answer]
    # On the main thread, at once.
    assert asker.ask("gpu-a: Code: ", secret=True) == "secret for gpu-a: Code: "


def test_an_interrupt_wakes_the_thread_that_waits(monkeypatch, golden):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(getpass, "getpass", interrupt)
    asker = NotebookAsker(can_ask=True)
    thread, answers = _asked_by_a_thread(asker, prompt="gpu-a: Code: ", secret=True)
    with pytest.raises(KeyboardInterrupt):
        asker.serve(HANG_S)
    thread.join(HANG_S)
    golden(*answers)


def test_closing_wakes_all_and_answers_nobody_later(golden):
    asker = NotebookAsker(can_ask=True)
    asker.serve(0)  # nothing to do
    asker.close()
    thread, answers = _asked_by_a_thread(asker, prompt="gpu-a: Code: ", secret=True)
    thread.join(HANG_S)
    golden(*answers)


def test_a_kernel_without_stdin_is_an_error_at_once(shell):
    shell.kernel = SimpleNamespace(_allow_stdin=False)
    with pytest.raises(AuthenticationError, match="gpu-a"):
        asker_of(shell).ask("gpu-a: Code: ", secret=True)


def test_a_cell_that_ends_leaves_nobody_waiting(lab):
    lab.value("%%distributed\nlen([])")
    assert lab.session.asker._closed
    lab.error("%%distributed\n1 / 0\nlen([])")
    assert lab.session.asker._closed


@pytest.mark.parametrize(
    ("answer", "limits"), [("y", [2**28, sys.maxsize]), ("", [2**28])]
)
def test_above_the_limit_the_user_is_asked(lab, monkeypatch, answer, limits, golden):
    asked, packed, announced = [], [], []

    def answered(prompt):
        asked.append(prompt)
        wait_until(
            lambda: "waits for your answer" in announced, "the words of the view"
        )
        return answer

    def pack_it(thunk, *, limit_bytes, labels, title):
        packed.append(limit_bytes)
        if limit_bytes < sys.maxsize:
            raise PayloadTooLarge("The call takes 2.0 GB.", "Use --payload-limit 4G.")
        thunk.uses = ()
        return thunk

    monkeypatch.setattr(pack, "pack_call", pack_it)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answered)
    monkeypatch.setattr(FakeScreen, "announce", lambda _, text: announced.append(text))
    result = lab.run("%%distributed\ndef f():\n    return 1\nf()")
    golden(*asked)
    assert "waits for your answer" in announced
    assert packed == limits
    assert result.success is (answer == "y")


# ---- started by a scheduler on every node


def test_the_hosts_of_a_kernel_that_a_scheduler_has_started(lab, monkeypatch, capsys):
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    for name, value in {**nodes, "SKYPILOT_NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    lab.value("%distributed hosts")
    assert capsys.readouterr().out == (
        "10.0.0.1, 10.0.0.2  (inside SkyPilot, node 1 of 2)\n"
    )


def test_a_node_that_follows_runs_its_own_statements_and_gets_its_own_ranks(
    lab, monkeypatch
):
    asked = []

    class Part:
        def run(self, digest, access, spec, launch, before):
            asked.append(digest)
            before()
            return "its own ranks"

    monkeypatch.setattr(inside.Inside, "part", lambda *_: Part())
    cell = "def train():\n    return 7\ntrain()"
    assert lab.value(f"%%distributed -o run\n{cell}") is None
    assert lab.shell.user_ns["run"] == "its own ranks"
    assert lab.shell.user_ns["train"]() == 7
    assert lab.value(f"%%distributed\n{cell}") == "its own ranks"
    assert len(set(asked)) == 2, "another line is another cell"
    assert "launch" not in lab.session.log
