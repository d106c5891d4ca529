"""Run the bench: `python -m tests.bench [--only start,load] [--rounds N] [--readme]`.

Each section's figures are kept in build/bench/SECTION.json, so that a table can be made of sections that were run one
by one. Sections that need hosts need what the tests' lab needs: Linux, root, OpenSSH's server, iproute2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

from tests.bench import anatomy, machine, table
from tests.bench.bench import FOLDER, REPOSITORY, Bench
from tests.bench.figures import Section
from tests.lab import isolate
from tests.system.components import reason_without

SECTIONS = (
    "load",
    "report",
    "crowd",
    "many",
    "start",
    "imports",
    "page",
    "anatomy",
    "stay",
    "doctor",
    "slurm",
    "deliver",
    "files",
    "result",
    "soak",
)


def main() -> int:
    """Run the sections asked for, write the table, and return the exit code."""
    options = _options()
    chosen = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        print(
            f"no section {', '.join(unknown)}; there are: {', '.join(SECTIONS)}",
            file=sys.stderr,
        )
        return 2
    if reason := reason_without("lab"):
        print(f"the bench can't run here: {reason}", file=sys.stderr)
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    isolate()
    for name in chosen:
        _run(name, Bench(rounds=options.rounds, rounds_dear=options.rounds_dear))
    _write(readme=options.readme)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--only",
        default="",
        help=f"sections, with commas between them: {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="of what takes a second or so"
    )
    parser.add_argument(
        "--rounds-dear", type=int, default=5, help="of what takes longer"
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="put the table into distmagic/help/benchmarks.md, four rows into README.md",
    )
    return parser.parse_args()


def _run(name: str, bench: Bench) -> None:
    module = importlib.import_module(f"tests.bench.{name}")
    load, began = machine.load(), time.monotonic()
    bench.say(f"{name}: {module.TITLE}")
    rows = module.measure(bench)
    section = Section(
        name=name, title=module.TITLE, rows=rows, when=time.strftime("%Y-%m-%d %H:%M"),
        took_s=round(time.monotonic() - began, 1), machine=f"{machine.describe()}, load before {load:.1f}",
    )  # fmt: skip
    (FOLDER / f"{name}.json").write_text(table.as_json([section]))


def _write(*, readme: bool) -> None:
    files = [FOLDER / f"{name}.json" for name in SECTIONS]
    sections = [
        section
        for file in files
        if file.exists()
        for section in table.from_json(file.read_text())
    ]
    text = table.as_text(sections)
    (FOLDER / "bench.json").write_text(table.as_json(sections))
    (FOLDER / "bench.txt").write_text(text)
    print(text, end="")
    print(
        f"written to {_shown(FOLDER / 'bench.txt')} and {_shown(FOLDER / 'bench.json')}",
        file=sys.stderr,
    )
    if readme:
        pages = {
            REPOSITORY / "README.md": table.headlines(sections),
            REPOSITORY / "distmagic" / "help" / "benchmarks.md": table.as_markdown(
                sections
            ),
        }
        for page, markdown in pages.items():
            page.write_text(table.into_page(page.read_text(), markdown))
        if anatomy.PICTURE.exists():
            picture = f"```text\n{anatomy.PICTURE.read_text()}```"
            page = REPOSITORY / "distmagic" / "help" / "benchmarks.md"
            page.write_text(table.into_page(page.read_text(), picture, "anatomy"))


def _shown(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
