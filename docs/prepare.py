"""Puts the site's pages together: `python docs/prepare.py FOLDER`; with `requirements` it prints what the site needs.

README, manual, notebooks and changes stay in their places and are copied, in the same folders, so that their links hold.
Pages of commands, flags and the API are generated. A notebook that its test has executed comes from build/notebooks,
unless the notebook has changed since.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import distmagic
from distmagic.notebook.commands import SUBCOMMANDS
from distmagic.notebook.help_pages import topics
from distmagic.request.flag_table import FLAGS
from distmagic.request.flag_values import HEADINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "build" / "notebooks"
COPIED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "distmagic/__init__.py",
    "distmagic/help",
    "notebooks",
)
# Pages of the manual by part; all others are in the last one.
HOW_TO = "howto-hosts howto-code howto-train howto-where howto-choose"
PARTS = {
    "How to": HOW_TO.split(),
    "Cells and jobs": [
        "cell",
        "flags",
        "jobs",
        "ranks",
        "staying",
        "background",
        "elastic",
        "files",
        "packages",
        "sharing",
    ],
    "Hosts and clusters": [
        "ssh",
        "rendezvous",
        "slurm",
        "sky",
        "osmo",
        "inside",
        "export",
        "systems",
    ],
}
LAST = "Trouble, trust, terms"
API = """\
# Python API

`import distmagic` offers these names. Those of a rank do nothing outside a run, so a program that uses them also runs
by itself.

## In the notebook

```{eval-rst}
.. autofunction:: distmagic.run
.. autofunction:: distmagic.sweep
.. autofunction:: distmagic.compare
.. autoclass:: distmagic.Run
   :members:
.. autoclass:: distmagic.session.background.BackgroundRun
   :members:
.. autoclass:: distmagic.outcome.detached.Detached
   :members:
.. autoclass:: distmagic.sweeps.sweep.Sweep
   :members:
```

## In a rank

```{eval-rst}
.. autofunction:: distmagic.report
.. autofunction:: distmagic.track
.. autofunction:: distmagic.show
.. autofunction:: distmagic.checkpoint.save
.. autofunction:: distmagic.checkpoint.load
```

## Errors

Every error is a `DistmagicError`.

```{eval-rst}
"""


def index(notebooks: list[Path]) -> str:
    """Return the first page: the README, and the navigation over all pages."""
    shown = {page for pages in PARTS.values() for page in pages}
    parts = {**PARTS, LAST: [topic for topic in topics() if topic not in shown]}
    texts = sorted((ROOT / "notebooks").glob("*.md"))
    course = [f"notebooks/{path.stem}" for path in (*notebooks, *texts)]
    text = (ROOT / "README.md").read_text()
    text += toctree("Course", ["notebooks/index", *course])
    for caption, pages in parts.items():
        text += toctree(caption, [f"distmagic/help/{page}" for page in pages])
    reference = ["reference/api", "reference/commands", "reference/flags"]
    text += toctree("Reference", reference)
    return text + toctree("Project", ["CHANGELOG", "CONTRIBUTING"])


def toctree(caption: str, pages: list[str]) -> str:
    """Return a part of the navigation."""
    lines = "\n".join(pages)
    return f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{lines}\n```\n"


def course(notebooks: list[Path]) -> str:
    """Return the page of the course: what one can do after each notebook, and how long it takes."""
    text = "# The course\n\nEach notebook runs on a Linux laptop without a GPU, and unchanged on hosts of your own.\n"
    for path in notebooks:
        opening = sources(path)[0]
        title = opening.splitlines()[0].removeprefix("# ")
        text += f"\n## [{title}]({path.name})\n"
        for found in re.findall(r"^\*\*After this notebook.*", opening, re.MULTILINE):
            text += f"\n{found}\n"
        for found in re.findall(r"\*\*Time\*\*: .* minutes", opening):
            text += f"\n{found}\n"
    return text


def table(heads: Iterable[str], rows: Iterable[tuple[str, str]]) -> str:
    """Return a table whose first column is code."""
    text = f"| {' | '.join(heads)} |\n|---|---|\n"
    for code, meaning in rows:
        first, second = (one.replace("|", "\\|") for one in (code, meaning))
        text += f"| `{first}` | {second.replace('*', chr(92) + '*')} |\n"
    return text


def flags() -> str:
    """Return the page of all flags, from the table that the parser follows."""
    text = "# All flags\n\nThis table is generated from the parser's own. The page [flags](../distmagic/help/flags.md) has examples.\n"
    for group, heading in HEADINGS.items():
        rows = [
            (f"--{flag.name} {flag.metavar}".rstrip(), flag.help)
            for flag in FLAGS
            if flag.heading == group
        ]
        text += f"\n## {heading}\n\n{table(('flag', 'meaning'), rows)}"
    return text


def commands() -> str:
    """Return the page of all commands."""
    rows = [
        (f"%distributed {one.name} {arguments}".rstrip(), meaning)
        for one in SUBCOMMANDS
        for arguments, meaning in one.usages
    ]
    text = "# All commands\n\nThis table is generated from the magic's own. `distmagic NAME` does the same in a terminal.\n\n"
    return text + table(("command", "meaning"), rows)


def api() -> str:
    """Return the page of the API: each public name, with its docstring."""
    found = {name: getattr(distmagic, name) for name in distmagic.__all__}
    errors = [
        name
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    errors.sort(key=lambda name: len(found[name].__mro__))
    text = "".join(f".. autoexception:: distmagic.{name}\n" for name in errors)
    return f"{API}{text}```\n"


def best(notebook: Path) -> Path:
    """Return the executed notebook if it has the same cells, else the notebook itself."""
    executed = EXECUTED / notebook.name
    is_same = executed.exists() and sources(executed) == sources(notebook)
    return executed if is_same else notebook


def sources(path: Path) -> list[str]:
    """Return the text of each cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


def requirements() -> list[str]:
    """Return what the site needs: the extra `docs` in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = project["optional-dependencies"]["docs"]
    return found


def main(folder: Path) -> None:
    """Write all pages to `folder`, and next to it, in `extra`, what they show as it is."""
    for old in (folder, folder.with_name("extra")):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "assets", folder.with_name("extra") / "assets")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        shutil.copy(best(path), folder / "notebooks" / path.name)
    (folder / "reference").mkdir()
    (folder / "index.md").write_text(index(notebooks))
    (folder / "notebooks" / "index.md").write_text(course(notebooks))
    (folder / "reference" / "api.md").write_text(api())
    (folder / "reference" / "commands.md").write_text(commands())
    (folder / "reference" / "flags.md").write_text(flags())
    with_outputs = [path for path in notebooks if best(path) != path]
    print(f"{len(with_outputs)} of {len(notebooks)} notebooks have outputs")


if __name__ == "__main__":
    if sys.argv[1] == "requirements":
        print(*requirements())
    else:
        main(Path(sys.argv[1]))
