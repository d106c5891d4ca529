"""What a notebook shows of an error: what happened, the user's own line, what to do."""

import pytest

from distmagic import errors
from distmagic.errors import WorkerFailed
from distmagic.notebook import help_pages

CELL = """\
Traceback (most recent call last):
  Cell In[3], line 7, in <module>
    work(4)
  Cell In[2], line 3, in halve
    return torch.nn.functional.relu(x, y)
           ~~~~~~~~~~~~~~~~~~~~~~~~^^^^^^
  File "/opt/env/lib/python3.11/site-packages/torch/nn/functional.py", line 10, in relu
    raise TypeError("no")
TypeError: no
"""
SCRIPT = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in step
    loss.backward()
  File "/opt/env/lib/python3.11/site-packages/torch/_tensor.py", line 10, in backward
    raise RuntimeError("no")
RuntimeError: no
"""
LIBRARY = """\
Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/tool.py", line 10, in main
    raise RuntimeError("no")
RuntimeError: no
"""


@pytest.mark.parametrize(
    ("traceback", "own"),
    [
        (CELL, ["  Cell In[2], line 3, in halve", "--> return torch.nn.functional.relu(x, y)"]),
        (SCRIPT, ['  File "/home/me/train.py", line 12, in step', "--> loss.backward()"]),
        (LIBRARY, []),
        ("", []),
        ("Cell In[1]", []),
        ('  File "x.py", line 1', []),
    ],
)  # fmt: skip
def test_the_error_box_shows_the_innermost_line_of_the_users_own(traceback, own):
    error = WorkerFailed(
        "rank 1 (gpu-a, local_rank 1) raised TypeError: no",
        "Its whole output: run.logs(1).",
        traceback,
    )
    assert error._render_traceback_() == [
        "WorkerFailed: rank 1 (gpu-a, local_rank 1) raised TypeError: no", *own, "Its whole output: run.logs(1).",
    ]  # fmt: skip
    assert traceback.rstrip() in str(error)


def test_the_error_box_names_the_page_of_the_manual_once():
    error = errors.Unreachable("gpu-a", "the name is unknown", "getent hosts gpu-a")
    assert error._render_traceback_()[1:] == [
        "getent hosts gpu-a",
        "More: %distributed help troubles",
    ]
    named = errors.PayloadError("too large", "See %distributed help files.")
    assert named._render_traceback_()[1:] == ["See %distributed help files."]
    several = errors.HostErrors((error, named))
    assert several._render_traceback_()[1:] == []
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    named = {one.topic for one in kinds if issubclass(one, errors.DistmagicError)}
    assert named - {""} <= {*help_pages.topics()}
