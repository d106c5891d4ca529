"""Recipes of the manual, executed as written on this machine, without its hosts: two ranks stand in for them."""

from __future__ import annotations

import re

from tests import REPOSITORY
from tests.notebooks.kernel import LiveNotebook, live_notebook

HELP = REPOSITORY / "distmagic" / "help"
THEIR_HOSTS = re.compile(r" --hosts \S+")


def recipe(page: str, words: str) -> str:
    """Return the only cell of a page with these words in it."""
    text = (HELP / f"{page}.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (cell,) = [cell for cell in found if words in cell]
    return cell


def on_two_ranks(cell: str) -> str:
    """Return a cell for two ranks of this machine."""
    first, _, rest = THEIR_HOSTS.sub("", cell).partition("\n")
    return f"{first} --nproc-per-node 2\n{rest}"


def finished(notebook: LiveNotebook, cell: str) -> bool:
    return "done 100% · 2 ranks on " in notebook.run(on_two_ranks(cell))


def test_programs_of_recipes_train_on_two_ranks(tmp_path):
    """On CPUs and gloo."""
    with live_notebook(tmp_path) as notebook:
        for words in ("DistributedSampler(data)", "stop += epoch == 3"):
            assert finished(notebook, recipe("howto-train", words))
        assert finished(notebook, recipe("howto-hosts", '"gloo")\n    device = "cuda"'))
        resumed = recipe("howto-train", 'checkpoint.load("snapshot.pt")')
        resumed = resumed.replace(
            "for epoch in range(start,",
            "print('epoch', start)\n    for epoch in range(start,",
        )
        assert finished(notebook, resumed)
        assert (tmp_path / "snapshot.pt").exists()
        assert "epoch 0" in notebook.run("print(_run.logs(0))")
        assert finished(notebook, resumed)
        assert "epoch 10" in notebook.run("print(_run.logs(0))")


def test_recipes_for_a_training_of_ones_own_run(tmp_path):
    """`train` is the reader's; what the flags do has tests of its own."""
    env = {"HF_TOKEN": "a-token"}
    with live_notebook(tmp_path, env) as notebook:
        notebook.run(
            "import os\n"
            "def train(*args, **options):\n"
            "    return args, options, os.environ.get('LR'), os.environ.get('HF_TOKEN')"
        )
        assert finished(notebook, recipe("howto-code", "--env LR=0.1"))
        shown = notebook.run("_run.results[1]")
        assert shown == "((), {'steps': 500}, '0.1', 'a-token')"
        assert finished(notebook, recipe("howto-hosts", "--debug -o run"))
        assert finished(notebook, recipe("flags", "--hang-timeout 10m --grace 2m"))
        notebook.run("print(run.logs(0))")


def test_recipes_for_ranks_that_stay_run_one_after_the_other(tmp_path):
    with live_notebook(tmp_path) as notebook:
        notebook.run(
            "import torch\n"
            "def load():\n    return torch.nn.Linear(2, 1)\n"
            "def train(model, optimizer=None, lr=0.0):\n"
            "    return optimizer.param_groups[0]['lr'] if optimizer else lr"
        )
        load = recipe("howto-train", "model = load()")
        notebook.run(on_two_ranks(load))
        shown = notebook.run(recipe("howto-train", "train(model, lr=0.1)"))
        assert shown.splitlines()[-1] == "ranks 0-1: 0.1"
        notebook.run(
            "%%ranks\nimport torch\noptimizer = torch.optim.SGD(model.parameters(), lr=1.0)"
        )
        shown = notebook.run(recipe("howto-train", '["lr"] = 1e-4'))
        assert shown.splitlines()[-1] == "ranks 0-1: 0.0001"
        notebook.run("%distributed end")
