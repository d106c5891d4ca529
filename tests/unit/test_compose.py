"""compose.yaml, as far as a machine without docker can check it: who reaches the notebook, and what is installed."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests import REPOSITORY

COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
(SERVICE,) = COMPOSE["services"].values()
SHELL, _OPTIONS, SCRIPT = SERVICE["command"]
MAKE, ACTIVATE, JUPYTER = SCRIPT.splitlines()


def test_the_notebook_listens_on_this_machine_alone_and_asks_for_a_token():
    assert SERVICE["ports"] == ["127.0.0.1:8888:8888"]
    assert "network_mode" not in SERVICE
    assert re.search("token|password", str(SERVICE)) is None, "Jupyter makes a token"


def test_the_container_gets_this_folder_and_a_volume_and_no_rights():
    folder, volume = (one.split(":") for one in SERVICE["volumes"])
    assert folder == [".", SERVICE["working_dir"]]
    assert volume[0] in COMPOSE["volumes"]
    assert set(SERVICE) == {"image", "init", "shm_size", "ports", "volumes",
                            "working_dir", "command"}  # fmt: skip


def test_its_python_is_one_that_the_project_supports():
    name, version = SERVICE["image"].split(":")
    assert name == "python"
    assert tuple(map(int, version.split("."))) >= (3, 10)


def test_make_installs_what_notebooks_need_into_the_volume():
    """And only there: the checkout's own .venv is of another system."""
    venv = f"{SERVICE['volumes'][1].split(':')[1]}/venv"
    assert MAKE.split()[1:] == [f"venv={venv}", f"{venv}/.notebooks"]
    done = subprocess.run(
        [*MAKE.split(), "--dry-run"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"sh .ci/make-venv python3 {venv}" in done.stdout
    assert "--editable '.[notebooks]'" in done.stdout
    assert ".venv" not in re.sub(r"make-venv|#.*", "", done.stdout).replace(venv, "")
    assert f". {venv}/bin/activate" == ACTIVATE
    assert JUPYTER.startswith("exec jupyter lab ")


@pytest.mark.parametrize(
    "page", ["README.md", "distmagic/help/howto-where.md"], ids=["readme", "manual"]
)
def test_the_pages_name_the_command(page):
    assert "docker compose up" in (REPOSITORY / page).read_text()


def test_jupyter_opens_the_course_to_the_published_port():
    *_, address, as_root, no_browser, folder = JUPYTER.split()
    assert address == "--ServerApp.ip=0.0.0.0"  # of the container
    assert as_root == "--ServerApp.allow_root=True"
    assert no_browser == "--no-browser"
    assert (REPOSITORY / folder / "00_quickstart.ipynb").exists()
