"""A cell's call, and a process that runs its payload as a rank does."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from pathlib import Path

from distmagic.payload import bundle, pack
from tests.builders.forks import Forks
from tests.lab.waiting import HANG_S

CELL = "/tmp/ipykernel_1/cell.py"


def cell(source: str, filename: str = CELL, **names):
    """Run all lines of a cell but the last in a notebook's namespace, and return the last as the call."""
    source, _, last = source.rpartition("\n")
    namespace = {"__name__": "__main__", "__builtins__": __builtins__, **names}
    exec(compile(source, filename, "exec"), namespace)
    exec(compile(f"def cell(): return {last}", filename, "exec"), namespace)
    linecache.cache[filename] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        filename,
    )
    return namespace["cell"]


_RANK = """
import sys, types
bundle, payload_call, payload_code, folder = sys.argv[1:]
if __name__ == "__main__":
    sys.path[:0] = [bundle]
    from distmagic.remote.rank import sources
    sys.path[1:1] = sources.read(payload_code).get("roots", ())
    sys.path.append(bundle + "/fallback")
    from pathlib import Path
    from distmagic.remote.values import call
    sources.load(Path(payload_code))
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = call.write_main(Path(folder, call.MAIN_FILE), payload_call)
    print(call.perform(call.load(payload_call, main), main))
"""


def on_a_rank(
    payload: pack.Payload, tmp_path: Path, *flags: str, forks: Forks | None = None
) -> str:
    """Run a payload as a rank does, in a process that finds distmagic in the bundle alone."""
    argv = [
        str(bundle.build().path),
        str(payload.call.path),
        str(payload.code.path),
        str(tmp_path),
    ]
    if forks is not None:
        script = tmp_path / "rank.py"
        script.write_text(_RANK)
        forked = forks.run(script, *argv, cwd="/")
        assert forked.returncode == 0, forked.stderr.decode()
        return forked.stdout.decode().strip()
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }
    done = subprocess.run(
        [sys.executable, *flags, "-c", _RANK, *argv],
        capture_output=True, text=True, check=False, cwd="/", env=environment, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
