"""README and help pages keep their word: commands exist, flags are the flags, links lead somewhere, code parses."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from distmagic import errors
from distmagic.notebook import commands, help_pages
from distmagic.request import flag_parser, flags, spec
from distmagic.request.cells.cell import parse_cell
from distmagic.request.config import Distmagic
from distmagic.request.flags import split_program
from distmagic.request.hosts import parse_hosts
from tests import REPOSITORY
from tests.bench import table
from tests.builders import golden

README = REPOSITORY / "README.md"
HELP = sorted((REPOSITORY / "distmagic" / "help").glob("*.md"))
PAGES = [README, *HELP]
LINKED = [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"]
TORCHRUN = {"--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id",
            "--master-port", "--local-addr"}  # fmt: skip
OF_COMMANDS = {
    "--keep",
    "--collective",
    "--json",
    "--everybody",
    "--name",
    "--requirements",
    "--lock",
    "--cluster",
    "--by-time",
    "--rank",
    "--all",
    "--steps",
}
# Of programs that the manual starts: accelerate, bash, containers, training scripts, wsl.
OF_OTHERS = {"--deepspeed", "--device", "--epochs", "--execute", "--init", "--ipc", "--logdir", "--network", "--nv", "--to",
             "--cpus", "--gres", "--me", "--ntasks-per-node", "--num-nodes", "--offset", "--output", "--payload", "--size", "--type",
             "--gpus", "--install", "--local", "--master-addr", "--node-rank", "--nproc", "--rdzv", "--user", "--volumes", "--world"}  # fmt: skip
PICTURE_BYTES = 150_000


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [text for name, text in found if name == language]


def name_of(page: Path) -> str:
    return page.name


# The variables of the notebook that examples pass on.
DEFAULTS = flags.Defaults(environ={"HF_TOKEN": "one", "WANDB_API_KEY": "two"})
SNIPPETS = [(page, snippet) for page in PAGES for snippet in blocks(page, "python")]
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 7_000


def promises() -> list[str]:
    """Return the sentences of the README's table of promises, and what it says of faults below it."""
    what_you_get = README.read_text().partition("## What you get")[2].partition("##")[0]
    found = re.findall(r"\d+ (faults .*?)\.", what_you_get)
    for row in re.findall(r"^\| \w.*?\| (.*) \|$", what_you_get, re.MULTILINE):
        found += [promise.strip() for promise in row.split(";")]
    return found


def test_every_promise_is_the_mark_of_a_test():
    """Of one, or of a row of its parameters; and no mark has another sentence."""
    marked = set()
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        source = file.read_text()
        if file == Path(__file__) or "pytest.mark.promise" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                "promise"
            ):
                marked.add(ast.literal_eval(node.args[0]))
    assert marked == set(promises())
    assert len(marked) > 20


def test_promises_are_plain_words():
    """What stood in brackets or behind a colon would be no sentence of its own."""
    for promise in promises():
        assert re.fullmatch(r"[\w ,`-]+", promise), promise


@pytest.mark.parametrize("page", HELP, ids=name_of)
def test_a_help_page_begins_with_its_title_and_with_what_it_answers(page):
    title, empty, sentence, *_ = page.read_text().splitlines()
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"[A-Z]", sentence)


@pytest.mark.parametrize("page", HELP, ids=name_of)
def test_the_readme_leads_to_every_help_page(page):
    assert f"](distmagic/help/{page.name})" in README.read_text()


@pytest.mark.parametrize("page", HELP, ids=name_of)
def test_help_pages_link_to_each_other_only(page):
    """And to other projects. They are shown in notebooks too, where nothing else of the repository is."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target) in HELP


@each_page
def test_every_make_command_is_a_target(page):
    targets = set(
        re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    )
    code = "\n".join(blocks(page, "")) + " ".join(
        re.findall(r"`(.*?)`", page.read_text())
    )
    assert set(re.findall(r"\bmake ([a-z]+)\b", code)) <= targets


def test_both_commands_are_on_the_first_screen():
    first = "\n".join(README.read_text().splitlines()[:25])
    assert "\nmake demo " in first
    assert "\nmake test " in first


@each_page
def test_flags_are_those_of_the_magic(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    assert named <= {*flag_parser.flag_names(), *OF_COMMANDS, *OF_OTHERS}


def test_the_page_of_flags_has_them_all():
    page = REPOSITORY / "distmagic" / "help" / "flags.md"
    rows = "\n".join(
        line for line in page.read_text().splitlines() if line.startswith("| `-")
    )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rows))
    # The latter is -o there.
    assert named == set(flag_parser.flag_names()) - {"--help", "--output"}
    assert "`-o NAME`" in rows


def test_flags_keep_torchruns_names():
    from torch.distributed.run import get_args_parser

    theirs = {
        name for action in get_args_parser()._actions for name in action.option_strings
    }
    assert set(flag_parser.flag_names()) >= TORCHRUN
    assert theirs >= TORCHRUN


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://", "#", "mailto:")):
            path = target.partition("#")[0].replace("\\", "")
            assert (page.parent / path).exists(), f"{page.name} links to {target}"


def test_files_that_contributing_names_exist():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", text):
        places = (REPOSITORY / name, REPOSITORY / "distmagic" / name)
        assert any(place.exists() for place in places), name


def test_the_picture_is_there_for_light_and_dark_and_is_small():
    pictures = re.findall(r'(?:src|srcset)="(.*?)"', README.read_text())
    assert sorted(pictures) == ["assets/run-dark.png", "assets/run-light.png"]
    for picture in pictures:
        assert (REPOSITORY / picture).read_bytes().startswith(b"\x89PNG")
        assert (REPOSITORY / picture).stat().st_size < PICTURE_BYTES


@pytest.mark.parametrize(
    ("page", "snippet"),
    SNIPPETS,
    ids=lambda found: getattr(found, "stem", None) or found[:25],
)
def test_python_of_the_pages_is_python(page, snippet, monkeypatch):
    # Whichever packages are installed where the pages are checked.
    monkeypatch.setattr(spec, "check_tracker", lambda *_: None)
    if snippet.startswith("%%distributed"):
        line, _, cell = snippet.partition("\n")
        request = flags.parse_line(line.removeprefix("%%distributed"), DEFAULTS)
        plan = parse_cell(f"#\n{cell}", whole=request.whole)
        assert plan.call is not None
    else:
        ast.parse(TransformerManager().transform_cell(snippet))


def test_the_cell_of_the_readme_says_what_it_means():
    (snippet,) = [
        one for one in blocks(README, "python") if one.startswith("%%distributed")
    ]
    line, _, cell = snippet.partition("\n")
    request = flags.parse_line(line.removeprefix("%%distributed"), flags.Defaults())
    assert request.output == "run"
    assert (
        ast.unparse(parse_cell(cell, whole=False).call)
        == "train(torch.zeros(100), torch.randn(1000, 64, 100))"
    )


def test_the_cell_of_the_readme_has_nine_lines():
    (snippet,) = [
        one for one in blocks(README, "python") if one.startswith("%%distributed")
    ]
    _, *lines = snippet.splitlines()
    assert len(lines) == 9
    assert [line for line in lines if ";" in line or len(line) > 120] == []


@each_page
def test_commands_of_a_page_are_read_as_they_stand(page):
    """Each line of its examples that is a `%distributed NAME ...` or, behind a `$`, a `distmagic NAME ...`."""
    code = "\n".join(blocks(page, "python") + blocks(page, ""))
    for line in re.findall(
        r"^(?:%distributed|\$ distmagic) (.*?)(?: +#.*)?$", code, re.MULTILINE
    ):
        name, *words = shlex.split(line)
        if name == "run":
            way, program = split_program(words)
            assert program
        else:
            assert name in commands.NAMES
            way, rest = flag_parser.split_way(words)
            forms = [form for one in commands.SUBCOMMANDS for form in one.flags]
            known = {*OF_COMMANDS, *(form.partition(" ")[0] for form in forms)}
            assert {word for word in rest if word.startswith("-")} <= known
        flags.parse_words(way, DEFAULTS)


@each_page
def test_functions_of_a_page_take_the_arguments_of_its_runs(page):
    """In the order of the page: a later function of the same name replaces the one before."""
    parameters: dict[str, int] = {}
    for snippet in blocks(page, "python"):
        cell = re.sub(r"^%.*", "", snippet, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.FunctionDef):
                parameters[node.name] = len(node.args.args)
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "distmagic.run":
                function, *args = map(ast.unparse, node.args)
                assert parameters.get(function, len(args)) == len(args), function


@each_page
def test_hosts_of_the_pages_are_hosts(page):
    text = page.read_text()
    for hosts in re.findall(
        r"(?:%distributed hosts |--hosts |DISTMAGIC_HOSTS=)([\w.@:,\[\] -]+?)(?:  +#|`|$)",
        text,
        re.MULTILINE,
    ):
        assert parse_hosts(hosts)


@each_page
def test_magics_and_settings_of_the_pages_exist(page):
    named = set(re.findall(r"(?<!%)%distributed ([a-z]+)", page.read_text()))
    assert named <= set(commands.NAMES)
    settings = set(re.findall(r"Distmagic\.(\w+)", page.read_text()))
    assert settings <= set(Distmagic.class_trait_names(config=True))


def test_the_page_of_jobs_has_every_command():
    text = (REPOSITORY / "distmagic" / "help" / "jobs.md").read_text()
    rows = set(re.findall(r"^\| `%distributed ([a-z]+)", text, re.MULTILINE))
    assert rows | {"help"} == set(commands.NAMES)


@pytest.mark.parametrize(
    "name", ["troubles", "osmo", "sky", "inside", "slurm", "export"]
)
def test_messages_that_a_page_explains_exist(name):
    """Each text in the first column of `you see` is in a golden message, or in the code that makes it."""
    files = [*(REPOSITORY / "distmagic").rglob("*.py")]
    files += (REPOSITORY / "tests" / "golden" / "messages").glob("*.txt")
    said = " ".join(file.read_text() for file in files)
    said += "KeyError: 'LOCAL_RANK'"  # Python's own
    said = re.sub(r'"\s*\n\s*f?"', "", said)
    page = (REPOSITORY / "distmagic" / "help" / f"{name}.md").read_text()
    for rows in re.findall(r"^\| you see .*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in rows.splitlines():
            for quoted in re.findall(r"`([^`]*)`", row.split(" | ")[0]):
                for piece in quoted.split("..."):
                    words = [
                        r"\S+"
                        if re.search(r"[\d(]|^(mine|ID|f|me)\b|gpu-|^--", word)
                        else re.escape(word)
                        for word in piece.strip(" ,:.").split()
                    ]
                    wanted = r"\s(?:\S+\s){0,3}?".join(words)
                    assert re.search(wanted, said), piece


def test_each_message_that_names_a_cure_has_a_row_or_names_its_page():
    """A cure is the second line of an error; `More: %distributed help TOPIC` ends those of some classes."""
    rows = [
        passage.text
        for topic in help_pages.topics()
        for passage in help_pages.passages(topic, help_pages.page(topic))
        if passage.text.startswith("| you see")
    ]
    lost = set()
    for file in (REPOSITORY / "tests" / "golden" / "messages").glob("*.txt"):
        for texts in golden.read(file).values():
            for text in texts.split("\n---\n"):
                kind = getattr(errors, text.partition(":")[0], None)
                if kind is None or "\n" not in text or "%distributed help" in text:
                    continue
                is_elsewhere = kind.topic not in {"", "troubles"}
                if not is_elsewhere and not any(
                    help_pages.explains(row, text) for row in rows
                ):
                    lost.add(text)
    # two errors that a test makes up
    assert {
        text
        for text in lost
        if not text.endswith((" answer.\nLook.", "raised\nSee it."))
    } == set()


def test_what_the_readme_says_of_the_bench_stands_on_its_page():
    page = (REPOSITORY / "distmagic" / "help" / "benchmarks.md").read_text()
    measured = set()
    for line in page.splitlines():
        if line.startswith("| "):
            what, ours, theirs, against, *_ = [
                cell.strip() for cell in line.strip("|").split(" | ")
            ]
            measured.add(
                (what, ours.partition(" (")[0], theirs.partition(" (")[0], against)
            )
    between = README.read_text().partition("<!-- bench: begin -->")[2]
    table_of_readme = between.partition("<!-- bench: end -->")[0]
    _head, _rule, *rows = table_of_readme.strip().splitlines()
    said = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]
    assert [(what, against) for what, _, _, against in said] == list(table.HEADLINES)
    assert set(said) <= measured


@pytest.mark.parametrize(
    "path",
    sorted((REPOSITORY / "notebooks").glob("*.ipynb")),
    ids=lambda path: path.stem,
)
def test_cells_of_a_notebook_are_clean_and_parse(path):
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            ast.parse(TransformerManager().transform_cell("".join(cell["source"])))
