"""What a notebook shows of an error: what happened, the user's own line, what to do."""

import pytest

from distmagic.errors import WorkerFailed

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
