"""What a Python runs at its start because of PYTHONPATH."""

import pytest

from distmagic.remote.contact import template_client
from distmagic.remote.system.customization import customizing_file


@pytest.mark.parametrize(
    "name", ["sitecustomize.py", "usercustomize.py", "sitecustomize/__init__.py"]
)
def test_a_program_for_the_start_of_every_process_is_found_and_leaves_nothing_loaded(
    name, tmp_path
):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    env = {"PYTHONPATH": f"{first}:{second}"}
    assert customizing_file(env) == ""
    assert template_client._can_be_warm(env)
    (second / name).parent.mkdir(exist_ok=True)
    (second / name).write_text("")
    assert customizing_file(env) == str(second / name)
    assert not template_client._can_be_warm(env)


def test_no_python_path_has_none():
    assert (
        customizing_file({})
        == customizing_file({"PYTHONPATH": ""})
        == customizing_file({"PYTHONPATH": "::"})
        == ""
    )
