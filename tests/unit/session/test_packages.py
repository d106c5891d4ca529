"""Which packages an environment gets: those of a kernel, a requirements file, a lock file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distmagic.errors import UsageError
from distmagic.session import packages

LOCAL = "left out, because it lies on this machine alone: {}"
NO_TORCH = "torch is not among the packages, and a run needs it"


def install(folder: Path, name: str, version: str = "1.0", origin: object = None):
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    if origin is not None:
        (about / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """All that is installed for this kernel."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "project"), str(folder)])
    return folder


def test_a_kernel_has_packages_of_an_index_and_those_of_its_own_machine(site, tmp_path):
    install(site, "torch", "2.13.0+cpu")
    install(site, "Some_Thing", "2.0")
    install(site, "distmagic")
    install(site, "pip")
    install(site, "mine", origin={"url": "file:///home/me/mine", "dir_info": {"editable": True}})  # fmt: skip
    install(site, "built", origin={"url": "file:///tmp/built-1.0.whl"})
    install(site, "direct", origin={"url": "https://files.example/direct.whl"})
    commit = {
        "url": "https://git.example/a.git",
        "vcs_info": {"vcs": "git", "commit_id": "abc"},
    }
    install(site, "of-git", origin=commit)
    install(tmp_path / "project", "beside")
    assert packages.of_kernel("kernel") == packages.Packages(
        name="kernel",
        requirements=(
            "direct @ https://files.example/direct.whl",
            "of-git @ git+https://git.example/a.git@abc",
            "Some_Thing==2.0",
            "torch==2.13.0",
        ),
        notes=(LOCAL.format("beside, built, mine"),),
    )


def test_a_requirements_file_is_read_with_those_that_it_names(tmp_path, golden):
    below = tmp_path / "below"
    below.mkdir()
    (below / "more.txt").write_text("-e ../mine\nnumpy>=2  # why\n")
    (tmp_path / "my train.txt").write_text(
        "# all\n--extra-index-url https://index.example/a#x\n-r below/more.txt\n\n"
        "rich==1 \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd\n./local\nx.whl\ny @ file:///y.whl\n"
    )
    found = packages.of_requirements(tmp_path / "my train.txt")
    assert found == packages.Packages(
        name="my-train",
        requirements=(
            "--extra-index-url https://index.example/a#x",
            "numpy>=2",
            "rich==1  --hash=sha256:ab  --hash=sha256:cd",
        ),
        notes=(LOCAL.format("-e ../mine, ./local, x.whl, y @ file:///y.whl"), NO_TORCH),
    )
    (below / "more.txt").write_text("-r more.txt\n")
    with golden.raises(UsageError):
        packages.of_requirements(below / "more.txt")
    (below / "more.txt").write_text("-c limits.txt\n")
    with golden.raises(UsageError):
        packages.of_requirements(below / "more.txt")


def test_a_lock_file_is_exported_here_or_goes_to_the_hosts(
    tmp_path, monkeypatch, golden
):
    project = tmp_path / "my project"
    project.mkdir()
    (project / "uv.lock").write_text("version = 1\n")
    (project / "pyproject.toml").write_text("[project]\n")
    (project / "pylock.toml").write_text("lock-version = '1.0'\n")
    (project / "poetry.lock").write_text("")
    (project / "frozen.txt").write_text("torch==2\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert packages.of_lock(project / "uv.lock") == packages.Packages(
        name="my-project",
        lock=(("uv.lock", "version = 1\n"), ("pyproject.toml", "[project]\n")),
    )
    assert packages.of_lock(project / "pylock.toml", "named") == packages.Packages(
        name="named", lock=(("pylock.toml", "lock-version = '1.0'\n"),)
    )
    assert packages.of_lock(project / "frozen.txt").requirements == ("torch==2",)
    with golden.raises(UsageError):
        packages.of_lock(project / "poetry.lock")
    uv = tmp_path / "uv"
    uv.write_text(
        '#!/bin/sh\n[ "$1 $2" = "export --frozen" ] || exit 1\n'
        'while [ $# -gt 1 ]; do [ "$1" = --output-file ] && to="$2"; shift; done\n'
        'echo "torch==3" > "$to"\n'
    )
    uv.chmod(0o755)
    assert packages.of_lock(project / "uv.lock") == packages.Packages(
        name="my-project", requirements=("torch==3",)
    )
    uv.write_text("#!/bin/sh\necho no such project >&2; exit 2\n")
    with golden.raises(UsageError):
        packages.of_lock(project / "uv.lock")


def test_a_list_that_is_too_long_to_send_is_refused(golden):
    with golden.raises(UsageError):
        packages.Packages(name="a", lock=(("uv.lock", "x" * 900_001),))
