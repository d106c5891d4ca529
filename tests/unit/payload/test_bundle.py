"""The bundle: everything in it can be imported from inside the zip by a Python that has nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from distmagic.errors import DistmagicError
from distmagic.payload import bundle
from tests import REPOSITORY
from tests.builders.shell import completed


@pytest.fixture(scope="module")
def home_with_bundle(tmp_path_factory):
    """A home in which a kernel has made the bundle: that takes a sixth of a second."""
    home = tmp_path_factory.mktemp("with-bundle")
    bundle._built.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DISTMAGIC_HOME", str(home))
        bundle.build()
    return home


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch, home_with_bundle):
    """A kernel that has just begun, in a home of its own where another one has made the bundle."""
    shutil.copytree(home_with_bundle, tmp_path / "home")
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    bundle._built.cache_clear()
    yield
    bundle._built.cache_clear()


def bare(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a Python without site-packages, environment or current directory."""
    argv = (sys.executable, "-I", "-S", *argv)
    return completed(argv, check=False, cwd="/")


def test_the_same_files_give_the_same_bundle(tmp_path, monkeypatch):
    there = bundle.build()
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "empty"))
    bundle._built.cache_clear()
    first = bundle.build()
    assert (first.blob, first.path.name) == (there.blob, there.path.name)
    assert first.path != there.path
    bundle._built.cache_clear()
    assert bundle.build() == first
    data = first.path.read_bytes()
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (
        first.blob.sha256,
        first.blob.size_bytes,
    )
    assert first.blob.size_bytes < 860_000


def test_a_bundle_that_was_removed_meanwhile_is_made_again():
    first = bundle.build()
    first.path.unlink()
    assert bundle.build() == first
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.blob.sha256


def test_another_kernel_takes_the_bundle_that_is_there(monkeypatch):
    first = bundle.build()
    bundle._built.cache_clear()
    monkeypatch.setattr(bundle, "_made", lambda *_: pytest.fail("it is there"))
    assert bundle.build() == first


@pytest.mark.parametrize("damage", ["cut", "gone", "noted wrongly"])
def test_another_kernel_makes_the_bundle_where_it_is_not_whole(damage):
    first = bundle.build()
    bundle._built.cache_clear()
    (note,) = (path for path in first.path.parent.iterdir() if path != first.path)
    if damage == "gone":
        first.path.unlink()
    else:
        (note if damage == "noted wrongly" else first.path).write_bytes(b"PK\0")
    assert bundle.build() == first
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.blob.sha256


def test_a_file_that_changed_is_in_the_next_bundle(monkeypatch, tmp_path):
    first = bundle.build()
    bundle._built.cache_clear()
    files = bundle._files()
    changed = tmp_path / "worker.py"
    changed.write_text("# another one\n")
    monkeypatch.setattr(
        bundle, "_files", lambda: {**files, "distmagic/remote/rank/worker.py": changed}
    )
    assert bundle.build() != first


def test_a_bundle_in_use_does_not_grow_old():
    path = bundle.build().path
    os.utime(path, (0, 0))
    assert bundle.build().path.stat().st_mtime > 0


def test_all_that_travels_is_in_it():
    with zipfile.ZipFile(bundle.build().path) as archive:
        names = set(archive.namelist())
    assert {
        "__main__.py",
        "distmagic/__init__.py",
        "distmagic/remote/rank/worker.py",
    } <= names
    assert {"cloudpickle/cloudpickle.py", "fallback/tqdm/std.py"} <= names
    assert "distmagic/payload/pack.py" not in names
    assert not [name for name in names if "keeper" in name]  # it travels as text
    assert not [name for name in names if "__pycache__" in name]


def test_a_bare_python_imports_everything_from_the_zip():
    path = bundle.build().path
    package = REPOSITORY / "distmagic"
    files = [
        file.relative_to(package).with_suffix("")
        for file in package.glob("remote/**/*.py")
        if file.parent.name != "keeper"
    ]
    remote = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
    code = f"""
import sys, importlib
sys.path.insert(0, {str(path)!r})
import distmagic, cloudpickle
for name in {remote!r}:
    if name != "__main__":
        importlib.import_module("distmagic." + name)
print(all({str(path)!r} in module.__file__ for module in (distmagic, cloudpickle)))
try:
    import tqdm
except ImportError:
    sys.path.append({str(path)!r} + "/fallback")
    import tqdm, tqdm.auto
print({str(path)!r} in tqdm.__file__, sum(tqdm.tqdm(range(4), disable=True)))
"""
    done = bare("-W", "ignore", "-c", code)
    assert done.stdout.split() == ["True", "True", "6"], done.stderr


def test_the_byte_code_beside_a_file_spares_the_compiler():
    path = bundle.build().path
    code = f"""
import sys
sys.path.insert(0, {str(path)!r})
from distmagic.remote.wire import lines
print(lines.Lines.feed.__code__.co_filename)
try:
    lines.Lines().feed(None)
except TypeError:
    import traceback
    print(traceback.format_exc())
"""
    done = bare("-c", code)
    # Else it would be below the zip.
    assert done.stdout.splitlines()[0] == "distmagic/remote/wire/lines.py", done.stderr
    assert "self._data += data" in done.stdout, "a traceback shows the file's own lines"


def test_it_starts_a_role():
    path = str(bundle.build().path)
    for argv in ((), ("nobody",)):
        done = bare(path, *argv)
        assert done.returncode == 1
        assert "contact, agent, engine, worker" in done.stderr
    done = bare("-c", f"""
import sys, types, runpy
role = types.ModuleType("distmagic.remote.agent.main")
role.main = lambda argv: print("agent", argv)
sys.path.insert(0, {path!r})
import distmagic.remote
sys.modules["distmagic.remote.agent.main"] = role
sys.argv = ["bundle", "agent", "a", "b"]
runpy.run_path({path!r}, run_name="__main__")
""")  # fmt: skip
    assert done.stdout.strip() == "agent ['a', 'b']", done.stderr


def test_a_missing_cloudpickle_is_an_error(monkeypatch, golden):
    monkeypatch.setattr(bundle, "_package", lambda _: {})
    with golden.raises(DistmagicError):
        bundle.build()


def test_two_kernels_that_make_the_same_bundle_at_once(tmp_path):
    """As two threads do here: each writes it aside and puts it in place."""
    files = bundle._files()
    note = tmp_path / "blobs" / "note"
    note.parent.mkdir()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: bundle._made(files, note), range(4)))
    assert len({one.blob.sha256 for one in made}) == 1
    assert sorted(path.name for path in note.parent.iterdir()) == sorted(
        ["note", made[0].blob.sha256]
    )
    assert note.read_text() == made[0].blob.sha256


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no columns")
def test_byte_code_that_travels_has_the_same_lines_and_fewer_bytes():
    text = "\n".join(
        [
            '"""A module."""',
            "def f(x):",
            '    """A function."""',
            *["    x = [y + 1 for y in x if y]", ""] * 90,
            "    try:",
            "        return x",
            *[""] * 300,
            "    finally: x = (",
            "        1, x)",
        ]
    )
    code = compile(text, "a.py", "exec")
    short = bundle._without_columns(code)
    functions = [next(c for c in one.co_consts if not isinstance(c, str | None)) for one in (code, short)]  # fmt: skip
    for before, after in ((code, short), functions):
        assert list(after.co_lines()) == list(before.co_lines())
    sizes = [len(one.co_linetable) for one in functions]
    assert sizes[1] < 0.8 * sizes[0]
    names: dict = {}
    exec(short, names)
    assert names["f"]([1]) == [91]
