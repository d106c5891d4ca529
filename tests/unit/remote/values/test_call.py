"""What ranks ask of a cell's names and of its shell commands."""

from __future__ import annotations

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from distmagic.remote.values import call
from distmagic.request.cells.shell_commands import with_commands


def test_names_with_an_underscore_are_the_users_unless_ipython_gives_them():
    names = ["_helper", "_x1", "_iter", "_run", "_", "___", "_i", "_iii", "_i3", "_12", "_oh", "_exit_code", "__name__"]  # fmt: skip
    assert list(filter(call.is_of_user, names)) == ["_helper", "_x1", "_iter"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("!echo {n} ${HOME}", "echo 3 ${HOME}"),
        ("!mkdir -p out/{train,val}", "mkdir -p out/{train,val}"),
        ("""!curl -d '{"lr": 1}' url""", """curl -d '{"lr": 1}' url"""),
        ("!awk '{print $1}' {name}.txt", "awk '{print $1}' {name}.txt"),
    ],
)
def test_braces_of_a_command_are_values_or_the_shells(text, command, monkeypatch):
    asked = []
    monkeypatch.setattr("subprocess.call", lambda one, **_: asked.append(one))
    exec(with_commands(text, TransformerManager().transform_cell), {"n": 3})
    assert asked == [command]
