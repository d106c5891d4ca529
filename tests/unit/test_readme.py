"""The README keeps its word: its commands exist, its flags are the flags, its links lead somewhere, its code parses."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from distmagic.notebook import commands
from distmagic.request import flags
from distmagic.request.cell import parse_cell
from distmagic.request.config import Distmagic
from distmagic.request.hosts import parse_hosts
from tests import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("notebooks/*.md")])
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
TORCHRUN = {"--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id",
            "--master-port", "--local-addr"}  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_every_make_command_is_a_target():
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(blocks("")) + " ".join(re.findall(r"`(.*?)`", README))))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_both_commands_are_on_the_first_screen():
    first = "\n".join(README.splitlines()[:25])
    assert "\nmake demo " in first
    assert "\nmake test " in first


def test_flags_are_those_of_the_magic_and_of_them_all():
    others = {"--help", "--user"}  # of the help itself; of pip
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - others
    known = set(flags.flag_names()) - {"--help", "--output"}  # README names the latter as -o
    assert named == known
    assert "`-o NAME`" in README


def test_flags_keep_torchruns_names():
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert set(flags.flag_names()) >= TORCHRUN
    assert theirs >= TORCHRUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            path = target.partition("#")[0].replace("\\", "")
            assert (page.parent / path).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: snippet.splitlines()[0][:30])
def test_python_in_the_readme_is_python(snippet: str):
    if snippet.startswith("%%distributed"):
        line, _, cell = snippet.partition("\n")
        request = flags.parse_line(line.removeprefix("%%distributed"), flags.Defaults())
        plan = parse_cell(f"#\n{cell}", whole=request.whole)
        assert plan.call is not None
    else:
        ast.parse(TransformerManager().transform_cell(snippet))


def test_the_cell_of_the_readme_says_what_it_means():
    (snippet,) = [one for one in PYTHON if one.startswith("%%distributed")]
    line, _, cell = snippet.partition("\n")
    request = flags.parse_line(line.removeprefix("%%distributed"), flags.Defaults())
    assert request.output == "run"
    assert request.access.pythons == (("", "/opt/conda/bin/python"),)
    assert ast.unparse(parse_cell(cell, whole=False).call) == "train(steps=500, lr=0.1)"


def test_hosts_in_the_readme_are_hosts():
    for text in re.findall(r"(?:^%distributed hosts |--hosts )([\w.@:,\[\] -]+?)(?:  +#|`|$)", README, re.MULTILINE):
        assert parse_hosts(text)


def test_magics_and_settings_in_the_readme_exist():
    named = set(re.findall(r"(?<!%)%distributed ([a-z]+)", README))
    assert named <= set(commands.NAMES)
    assert set(re.findall(r"Distmagic\.(\w+)", README)) <= set(Distmagic.class_trait_names(config=True))


def test_cells_of_the_quickstart_are_clean_and_parse():
    notebook = json.loads((REPOSITORY / "notebooks" / "00_quickstart.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            ast.parse(TransformerManager().transform_cell("".join(cell["source"])))
