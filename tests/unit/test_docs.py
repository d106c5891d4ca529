"""The site's generated pages: nothing that users can write or call is missing on them."""

import importlib.util
import inspect
import re

import pytest

import distmagic
from distmagic.notebook.commands import SUBCOMMANDS
from distmagic.outcome.detached import Detached
from distmagic.remote.rank import checkpoint
from distmagic.request.flag_table import FLAGS
from distmagic.session.background import BackgroundRun
from tests import REPOSITORY, prose
from tests.builders.course import NOTEBOOKS


@pytest.fixture(scope="module")
def prepare():
    path = REPOSITORY / "docs" / "prepare.py"
    spec = importlib.util.spec_from_file_location("prepare_docs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_flags_commands_and_public_names_have_a_place(prepare):
    flags, commands, api = prepare.flags(), prepare.commands(), prepare.api()
    for flag in FLAGS:
        assert f"| `--{flag.name}" in flags
    for command in SUBCOMMANDS:
        written = rf"`%distributed {command.name}[ `]"
        assert len(re.findall(written, commands)) == len(command.usages)
    for name in set(distmagic.__all__) - {"__version__"}:
        assert f":: distmagic.{name}" in api


def test_docstrings_of_the_api_are_written_as_all_pages_are():
    public = [getattr(distmagic, name) for name in distmagic.__all__ if name[0] != "_"]
    public = [one for one in public if not inspect.ismodule(one)]
    kinds = [one for one in public if isinstance(one, type)]
    kinds += [BackgroundRun, Detached]
    members = [member for kind in kinds for member in vars(kind).items()]
    members = [member for name, member in members if not name.startswith("_")]
    written = [*public, *kinds, checkpoint.save, checkpoint.load, *members]
    for one in written:
        text = inspect.getdoc(one) or ""
        assert list(prose.faults(text, with_cells=False)) == [], one


def test_pages_are_copied_with_what_they_show(prepare, tmp_path, capsys):
    prepare.main(tmp_path / "pages")
    assert f"of {len(NOTEBOOKS)} notebooks have outputs" in capsys.readouterr().out
    assert (tmp_path / "pages" / "distmagic" / "help" / "flags.md").exists()
    assert (tmp_path / "extra" / "assets" / "run-light.png").exists()
