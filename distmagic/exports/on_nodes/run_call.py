"""Runs the call at the end of a notebook's cell. torchrun starts this script on every rank.

Next to it are `call`, the pickled call with its large values; `code.zip`, the source of the cells;
and `distmagic.zip`, which reads them. The return value is not kept.
"""

import atexit
import sys
import types
from pathlib import Path


def main(folder: Path) -> None:
    """Run the call in `folder`, and exit like any script."""
    from distmagic.remote.rank import ending, sources
    from distmagic.remote.training import groups
    from distmagic.remote.values import call, parcel

    labels = sources.load(folder / "code.zip")
    fresh = types.ModuleType("__main__")
    fresh.__builtins__ = __builtins__  # type: ignore[attr-defined]
    fresh.__file__ = __file__
    sys.modules["__main__"] = fresh
    groups.install()
    atexit.register(ending.clear_main, fresh)
    try:
        what = call.load(folder / "call", fresh)
        assert isinstance(what, call.Call | call.Whole)
        call.perform(what, fresh)
    except parcel.ParcelError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        below = error.__traceback__.tb_next if error.__traceback__ else None
        sys.exit(ending.shown_traceback(error.with_traceback(below), labels))


if __name__ in ("__main__", "__mp_main__"):
    HERE = Path(__file__).resolve().parent
    ZIP = HERE / "distmagic.zip"
    sys.path[:0] = [str(ZIP), str(HERE)]
    sys.path.append(str(ZIP / "fallback"))  # tqdm, for nodes without it
    if __name__ == "__main__":
        main(HERE)
    else:  # a child process, such as a DataLoader's worker, that needs the call's definitions
        from distmagic.remote.values import call as calls

        calls.define(str(HERE / "call"), globals())
