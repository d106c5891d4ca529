"""Which local modules ranks that stay lack, as they are on disk, and how a rank loads them again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from distmagic.payload import local_modules
from distmagic.remote.values import reloading
from distmagic.staying import modules

FILES = {
    "parts.py": "size = 1\ndef made():\n    return size\nclass Net:\n    depth = 1\n",
    "model/__init__.py": "from .deep import twice\n",
    "model/deep.py": "from parts import made\ndef twice():\n    return 2 * made()\n",
    "other.py": "import json\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, from which they are imported."""
    write(tmp_path, FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("parts", "model", "model.deep", "other"):
        sys.modules.pop(name, None)


def write(folder: Path, files: dict[str, str]) -> None:
    for inner, text in files.items():
        path = folder / inner
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def on_disk() -> list[modules.ModuleText]:
    return modules.texts_of(local_modules.found(["model", "other", "os"]))


def test_the_files_of_modules_that_a_cell_imports_and_of_those_that_they_import(folder):
    found = {one.name: set(one.files) for one in on_disk()}
    assert found == {
        "model": {"model/__init__.py", "model/deep.py"},
        "other": {"other.py"},
        "parts": {"parts.py"},
    }


def test_what_has_changed_is_stale_and_what_imports_it(folder):
    there = {one.name: one for one in on_disk()}
    assert modules.stale(on_disk(), {}) == tuple(on_disk())
    assert modules.stale(on_disk(), there) == ()
    (folder / "parts.py").write_text("size = 2\n")
    assert [one.name for one in modules.stale(on_disk(), there)] == ["model", "parts"]


@pytest.mark.parametrize("is_own_disk", [True, False])
def test_changed_modules_are_loaded_again_before_those_that_import_them(
    folder, tmp_path_factory, is_own_disk
):
    import parts  # type: ignore[import-not-found]  # before the one that imports it
    from model import twice  # type: ignore[import-not-found]

    main = ModuleType("__main__")
    main.__dict__.update(parts=parts, twice=twice, Net=parts.Net, old=parts.Net())
    changed = FILES["parts.py"].replace("1", "5")  # of the same length and second
    here = folder
    if not is_own_disk:
        here = tmp_path_factory.mktemp("notebook")
        write(here, FILES)
    write(here, {"parts.py": changed})
    found = []
    for one in on_disk():
        data = (here / "parts.py").read_bytes()
        files = {"parts.py": data} if one.name == "parts" else one.files
        found.append(modules.ModuleText(one.name, str(here), files))
    reloading.bring(found, () if is_own_disk else (str(folder),), vars(main))
    assert sys.modules["parts"] is parts
    assert (folder / "parts.py").read_text() == changed
    assert (main.twice(), main.Net.depth, main.old.depth) == (10, 5, 1)
    assert type(main.old) is not main.Net


def test_modules_stay_as_they_were_where_the_new_text_is_wrong(folder):
    import parts  # type: ignore[import-not-found]

    (folder / "parts.py").write_text("size = (\n")
    with pytest.raises(SyntaxError):
        reloading.bring(on_disk(), (), {})
    assert sys.modules["parts"] is parts
    assert parts.made() == 1


def test_a_module_whose_file_is_gone_stays(folder):
    import model  # type: ignore[import-not-found]
    import model.deep  # type: ignore[import-not-found]

    deep = model.deep
    write(folder, {"model/__init__.py": "from parts import made as twice\n"})
    (folder / "model" / "deep.py").unlink()
    reloading.bring(on_disk(), (), {})
    assert model.twice() == 1
    assert sys.modules["model.deep"] is deep


def test_a_cell_without_changed_modules_looks_at_no_place_of_modules_again(monkeypatch):
    class Finder:
        def find_spec(self, *_: object) -> None:
            return None

        def invalidate_caches(self) -> None:
            raise AssertionError("a zip among sys.path's places is read again then")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    reloading.bring((), (), {})
