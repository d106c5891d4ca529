"""What of a cell runs in the notebook, and what on every rank."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from distmagic.errors import UsageError
from distmagic.request.cells.cell import (
    CellPlan,
    make_thunk,
    parse_cell,
)
from distmagic.request.cells.shell_commands import with_commands
from distmagic.request.cells.used_names import names_wanted


def cell(body: str) -> str:
    return "#%%distributed\n" + textwrap.dedent(body).strip("\n") + "\n"


def parse(body: str, *, whole: bool = False) -> CellPlan:
    return parse_cell(cell(body), whole=whole)


def refusal(body: str, *, whole: bool = False) -> str:
    with pytest.raises(UsageError) as caught:
        parse(body, whole=whole)
    return str(caught.value)


def called(plan: CellPlan) -> str:
    assert plan.call is not None
    return ast.unparse(plan.call)


@pytest.mark.parametrize(
    ("body", "call", "local", "targets"),
    [
        ("def f(): pass\nf()", "f()", 1, ()),
        ("f(3, lr=x * 2)", "f(3, lr=x * 2)", 0, ()),
        ("print(f())", "print(f())", 0, ()),
        ("f(1)['loss']", "f(1)['loss']", 0, ()),
        ("[f(i) for i in range(3)]", "[f(i) for i in range(3)]", 0, ()),
        ("f(key=lambda v: v + 1)", "f(key=lambda v: v + 1)", 0, ()),
        ("(y := f())", "(y := f())", 0, ()),
        ("f'{f()}'", "f'{f()}'", 0, ()),
        ("a = 1; f(a)", "f(a)", 1, ()),
        ("x = f()", "f()", 0, ("x",)),
        ("x = y = f()", "f()", 0, ("x", "y")),
        ("x: int = f()", "f()", 0, ("x",)),
        ('runs["a"] = o.x = f()', "f()", 0, ("runs['a']", "o.x")),
        ("m = f()\nprint(g(m))", "print(g(m))", 1, ()),
        ("m = 1\nprint(m)", "print(m)", 1, ()),
        ("f()\nprint('done')", "print('done')", 1, ()),
        ("def f(): pass\nm = f()\nprint(g(m))", "print(g(m))", 2, ()),
        ("def f(): pass\nm = f()\nmax(m, key=f)", "max(m, key=f)", 2, ()),
        ("def f(): pass\nf()\nn = 1\nprint(n)", "print(n)", 3, ()),
        ("import os\nif __name__ == '__main__':\n    f()", "f()", 1, ()),
        ("if '__main__' == __name__:\n    a = 1\n    x = f(a)", "f(a)", 1, ("x",)),
        ("def f(a=1, *b, c=2, **d): pass", "f()", 1, ()),
        ("def f(): pass\nx = 3", "f()", 2, ()),
        ("class A: pass\ndef f(): pass\nclass B: pass", "f()", 3, ()),
    ],
)
def test_the_last_expression_is_the_call(body, call, local, targets):
    plan = parse(body)
    assert called(plan) == call
    assert len(plan.local) == local
    assert plan.targets == targets
    assert not plan.is_async


@pytest.mark.parametrize(
    "body", ["await f()", "x = await f()", "f(await g())", "async def f(): pass"]
)
def test_a_call_that_awaits_is_async(body):
    plan = parse(body)
    assert plan.is_async
    assert inspect.iscoroutinefunction(make_thunk(plan, {}, "<cell>"))


@pytest.mark.parametrize(
    "body",
    [
        "for i in range(3): print(i)",
        "x = 3",
        "with open('x') as f: f.read()",
        "assert 1",
    ],
)
def test_a_cell_without_a_function_and_without_a_call_runs_as_a_whole(body):
    plan = parse(body)
    assert plan.call is None
    assert plan.local == ()
    assert plan.text == cell(body)


def test_whole_runs_nothing_here():
    plan = parse("def f(): pass\nf()", whole=True)
    assert plan == CellPlan(text=cell("def f(): pass\nf()"))


@pytest.mark.parametrize(
    "body",
    [
        "",
        "# only a comment",
        "class Net: pass",
        "import os",
        "def load(): pass\ndef train(): pass",
        "def a(): pass\ndef b(): pass\ndef c(n): pass",
        "def train(): pass\ntrain",
        "f = 1\nlambda: f()",
        "def train(epochs, lr=1, *, seed): pass",
        "async def train(a, b, /, c): pass",
        "def train(e): pass\nfor e in range(3):\n    train(e)",
        "a, b = f()",
        "x += f()",
        "run = f()\nprint(run)",
        "def f(): pass\nf()\nprint('done')",
        "run = f()\nrun.results[0]",
        "run = f()\ndisplay(run, 1)",
        "x = 1\nawait g()\nf()",
        "get_ipython().run_line_magic('time', 'f()')",
        "x = get_ipython().getoutput('ls')",
        "for i in range(2):\n    get_ipython().system('ls')",
    ],
)  # fmt: skip
def test_a_cell_that_can_not_run_says_what_to_write(body, golden):
    golden(refusal(body))


@pytest.mark.parametrize(
    "lines",
    [
        'runs["a"] = f()\nprint(runs)',
        "a, b = f()\nprint(a)",
        "run: Run = f()\nprint(run)",
        "o.run = f()\no.run",
        "def f(): pass\nf()\nprint(time.time() - t)",
        "def f(): pass\nlosses = f()\nprint(f'{min(losses)}')",
        "def f(): pass\nrun = f()\nprint(len(run))",
        "def f(): pass\nlosses = f()\nbest = min(losses)",
    ],
)
def test_a_look_at_what_any_assignment_has_stored_is_refused(lines):
    assert "would run in the notebook" in refusal(lines)


@pytest.mark.parametrize("word", ["while", "if", "with", "try", "match"])
def test_every_block_at_the_end_is_named(word, golden):
    heads = {
        "while": "while go():",
        "if": "if go():",
        "with": "with go():",
        "try": "try:",
        "match": "match go():\n    case _:",
    }
    indent = "    " * (heads[word].count("\n") + 1)
    tail = "\nfinally:\n    pass" if word == "try" else ""
    golden(refusal(f"def f(): pass\n{heads[word]}\n{indent}f(){tail}"))


@pytest.mark.parametrize(
    "line", ["!ls", "%time f()", "x = !ls", "x = %time f()", "f?", "  !ls"]
)
def test_whole_refuses_ipython_syntax_and_names_the_line(line, golden):
    golden(refusal(f"a = 1\n{line}", whole=True))


COMMANDS = """\
name = "two"
if name:
    !printf 'one {name}'
lines = !printf 'a\\nb' | awk '{print $1}'
done = 3
"""


def test_commands_of_a_cell_on_ranks_are_run_by_python(capfd):
    transform = TransformerManager().transform_cell
    text = with_commands(cell(COMMANDS), transform)
    plan = parse_cell(text, whole=True)
    space: dict[str, object] = {}
    exec(compile(plan.text, "Cell", "exec"), space)
    assert capfd.readouterr().out == "one two"
    assert (space["lines"], space["_exit_code"]) == (["a", "b"], 0)
    assert text.splitlines()[-1] == "done = 3"
    assert len(text.splitlines()) == len(cell(COMMANDS).splitlines())


@pytest.mark.parametrize("body", ["x = 1\nx != 2", "f?", "x = = 1", "%time f()"])
def test_a_cell_without_commands_stays_as_it_is(body):
    assert with_commands(cell(body), TransformerManager().transform_cell) == cell(body)


def test_other_magics_beside_commands_are_refused_on_ranks(golden):
    text = with_commands(cell("!ls\n%time f()"), TransformerManager().transform_cell)
    with golden.raises(UsageError):
        parse_cell(text, whole=True)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "body",
    ["x = = 1", "def f(:\n  pass", "return 3", "x = 1\nyield f()", "for x in y\n  f()"],
)
def test_a_syntax_error_has_the_cells_line(body, whole):
    with pytest.raises(SyntaxError) as caught:
        parse_cell(cell(body), whole=whole, filename="here")
    assert caught.value.filename == "here"
    assert caught.value.lineno == (3 if body.startswith("x = 1") else 2)


def test_a_null_byte_is_refused_in_words():
    with pytest.raises((UsageError, SyntaxError), match="null bytes"):
        parse_cell("#%%distributed\nf('\0')", whole=False)


def test_the_thunk_is_evaluated_in_the_notebooks_namespace_with_the_cells_lines():
    space = {"__name__": "__main__", "__builtins__": __builtins__, "n": 4}
    plan = parse("""
        def half(x):
            return x / 2


        [half(i)
         for i in range(n)]
        """)
    exec(compile(ast.Module(list(plan.local), []), "Cell", "exec"), space)
    thunk = make_thunk(plan, space, "Cell")
    assert thunk() == [0, 0.5, 1, 1.5]
    assert thunk.__globals__ is space
    assert (thunk.__code__.co_filename, thunk.__code__.co_firstlineno) == ("Cell", 6)
    space["half"] = None
    with pytest.raises(TypeError) as caught:
        thunk()
    assert [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(caught.value.__traceback__)][1] == (
        "Cell", 6, "<module>",
    )  # fmt: skip


def test_arguments_are_evaluated_at_every_call():
    space = {"made": [], "__builtins__": __builtins__}
    thunk = make_thunk(parse("len([made.append(1), made])"), space, "Cell")
    assert space["made"] == []
    assert thunk() == 2
    assert space["made"] == [1]


def test_a_walrus_and_a_comprehension_leave_the_namespace_alone():
    space = {"__builtins__": __builtins__}
    assert make_thunk(
        parse("(y := int('3'), [y for _ in range(2)])"), space, "Cell"
    )() == (3, [3, 3])
    assert "y" not in space


def test_an_async_thunk_is_awaited():
    async def double(x):
        return 2 * x

    thunk = make_thunk(parse("await double(4)"), {"double": double}, "Cell")
    assert asyncio.run(thunk()) == 8


def test_the_thunk_obeys_the_notebooks_future_statements():
    import __future__

    plan = parse("[f for f in [lambda: 0] if repr(f)]")
    flags = __future__.annotations.compiler_flag
    assert make_thunk(plan, {}, "Cell", flags).__code__.co_flags & flags


def test_only_function_is_called_at_its_own_line():
    space = {"__builtins__": __builtins__, "main": lambda: 5}
    thunk = make_thunk(parse("x = 1\n\ndef main():\n    return 5\n"), space, "Cell")
    assert thunk() == 5
    assert thunk.__code__.co_firstlineno == 4


def test_a_whole_cell_has_no_thunk():
    with pytest.raises(ValueError, match="has no call"):
        make_thunk(parse("x = 1"), {}, "Cell")


def test_names_that_a_whole_cell_takes_from_outside():
    plan = parse(
        """
        import os
        total = 0
        for i in range(n):
            total += step(i, os.getcwd())
        def helper(batch):
            global made
            made = [len(x) for x in batch]
            return made, lr, __name__
        """,
        whole=True,
    )
    assert names_wanted(plan) == {"lr": 9, "n": 4, "step": 5}


def test_names_are_unknown_after_a_star_import():
    assert names_wanted(parse("from os import *\ngetcwd", whole=True)) == {}


@given(st.text(alphabet="abf()=:\n \t'\"#%!?,[]{}xyz01\\", max_size=40))
def test_any_text_is_a_plan_or_an_error_of_the_two_kinds(body):
    for whole in (False, True):
        try:
            plan = parse_cell(f"#%%distributed\n{body}", whole=whole)
        except (UsageError, SyntaxError):
            continue
        assert whole <= (plan.call is None)
