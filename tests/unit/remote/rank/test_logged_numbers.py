"""Numbers that libraries log are metrics: every test is a script of its own in a fresh Python, as a rank has it.

The frameworks are stand-ins with the classes and methods that the real ones have; the real ones run in
tests/e2e/test_frameworks.py where they are installed.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
import tqdm

from tests import REPOSITORY
from tests.builders.shell import completed

BEFORE = """
import base64, json, math, struct, sys
from distmagic.remote.rank import bars, logged_numbers, report
SENT = []
report.begin(lambda data: SENT.append(json.loads(data)) or True, 0, 0)
bars.install()
logged_numbers.install()
"""
AFTER = """
report.end()
rows = {}
for message in SENT:
    for name, text in message["points"].items():
        numbers = struct.unpack(f"<{len(base64.b64decode(text)) // 8}d", base64.b64decode(text))
        for at_s, step, value in zip(numbers[0::3], numbers[1::3], numbers[2::3]):
            rows.setdefault((at_s, None if math.isnan(step) else step), {})[name] = value
print(json.dumps([[step, metrics] for (_, step), metrics in sorted(rows.items(), key=lambda row: row[0][0])]))
print(json.dumps([message.get("step") for message in SENT if message.get("step") is not None]))
"""
STAND_INS = {
    "transformers/__init__.py": "",
    "transformers/trainer_callback.py": """
        class CallbackHandler:
            def on_log(self, args, state, control, logs):
                logs.pop("total_flos", None)
                return "handled"
    """,
    "accelerate/__init__.py": "",
    "accelerate/accelerator.py": """
        class Accelerator:
            def log(self, values, step=None, log_kwargs=None):
                return "logged"
    """,
    "lightning/__init__.py": "",
    "lightning/pytorch/__init__.py": "",
    "lightning/pytorch/bar.py": """
        import tqdm
        class Tqdm(tqdm.tqdm):
            pass
    """,
    "lightning/pytorch/trainer/__init__.py": "",
    "lightning/pytorch/trainer/connectors/__init__.py": "",
    "lightning/pytorch/trainer/connectors/logger_connector/__init__.py": "",
    "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py": """
        class _LoggerConnector:
            def __init__(self, trainer):
                self.trainer = trainer
            def log_metrics(self, metrics, step=None):
                return "logged"
    """,
}


@pytest.fixture
def rank(tmp_path: Path):
    """Return a function that runs a script as a rank does, and returns its metrics with their steps."""
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    found = [str(REPOSITORY), str(tmp_path), str(Path(tqdm.__file__).parents[1])]

    def run(script: str) -> tuple[list, list]:
        code = BEFORE + textwrap.dedent(script) + AFTER
        done = completed(
            [sys.executable, "-c", code],
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        )
        assert done.returncode == 0, done.stderr
        metrics, steps = done.stdout.splitlines()[-2:]
        return json.loads(metrics), json.loads(steps)

    return run


def test_a_step_that_is_no_plain_number_spoils_no_report(rank):
    metrics, _ = rank("""
        from distmagic.remote.rank import report
        class Step:
            def item(self):
                return 3
        for step in (Step(), "third", [1]):
            report.report_logged({"loss": 0.5}, report.NumberSource.FRAMEWORK, step)
    """)
    assert [(step, row) for step, row in metrics] == [
        (3.0, {"loss": 0.5}),
        (None, {"loss": 0.5}),
        (None, {"loss": 0.5}),
    ]


def test_the_postfix_of_a_bar(rank):
    metrics, _ = rank("""
        from tqdm import tqdm
        class Zero:
            ndim = 0
            def item(self):
                return 2.5
        class Many(Zero):
            ndim = 1
        with tqdm(total=3, mininterval=0) as bar:
            for i in range(3):
                bar.set_postfix({"loss": 0.123456 * i}, lr="1e-4", name="adam", ok=True)
                bar.update()
            bar.set_postfix(tensor=Zero(), many=Many(), n=7, original=0.5, bar=2)
            bar.set_postfix_str("acc=0.9, top5: 0.99, used=30%")
            bar.set_postfix_str("warming up")
            bar.set_postfix()
    """)
    assert metrics == [
        [float(i), {"loss": 0.123456 * i, "lr": 1e-4}] for i in range(3)
    ] + [
        [3.0, {"tensor": 2.5, "n": 7.0, "original": 0.5, "bar": 2.0}],
        [3.0, {"acc": 0.9, "top5": 0.99}],
    ], "each stands at the count of its bar"


def test_numbers_of_an_iterated_bar_stand_at_its_true_count(rank):
    """Its own count is that of its last look at the clock. A bar an epoch counts each anew, and the notebook goes on."""
    metrics, _ = rank("""
        from tqdm import tqdm
        for epoch in range(2):
            for i in (bar := tqdm(range(100), mininterval=60)):
                if i in (40, 99):
                    bar.set_postfix(loss=i)
    """)
    assert metrics == [
        [step, {"loss": loss}]
        for step, loss in [(41, 40), (100, 99), (41, 40), (100, 99)]
    ]


def test_what_stands_in_front_of_a_bar(rank):
    """So minGPT tells its loss."""
    metrics, _ = rank("""
        from tqdm import tqdm
        bar = tqdm(enumerate("ab"), total=2)
        for it, _ in bar:
            bar.set_description(f"epoch 1 iter {it}: train loss {2.5 - it:.5f}. lr {6e-4:e}")
            bar.set_description("epoch 1: loading 3 shards")
        tqdm(total=1).set_description_str()
    """)
    assert metrics == [
        [1.0, {"train_loss": 2.5, "lr": 6e-4}],
        [2.0, {"train_loss": 1.5, "lr": 6e-4}],
    ]


def test_a_bar_that_is_switched_off_says_nothing(rank):
    metrics, _ = rank("""
        from tqdm import tqdm
        bar = tqdm(range(3), disable=True)
        bar.set_postfix(loss=1)
        bar.set_postfix_str("loss=1")
    """)
    assert metrics == []


def test_what_a_trainer_of_transformers_logs(rank):
    metrics, steps = rank("""
        from types import SimpleNamespace
        from transformers.trainer_callback import CallbackHandler
        state = SimpleNamespace(global_step=20)
        logs = {"loss": 0.5, "total_flos": 1e15, "note": "x"}
        assert CallbackHandler().on_log(None, state, None, logs) == "handled"
        assert CallbackHandler().on_log(None, state, None, logs={"eval_loss": 0.25}) == "handled"
    """)
    assert metrics == [
        [20.0, {"loss": 0.5, "total_flos": 1e15}],
        [20.0, {"eval_loss": 0.25}],
    ]
    assert steps == [], "how far the rank is, its bar says"


def test_what_accelerate_logs(rank):
    metrics, _ = rank("""
        from accelerate.accelerator import Accelerator
        assert Accelerator().log({"loss": 0.5}, step=3) == "logged"
        Accelerator().log({"loss": 0.25}, log_kwargs={})
    """)
    assert metrics == [[3.0, {"loss": 0.5}], [None, {"loss": 0.25}]]


def test_what_lightning_logs_and_not_its_bar_too(rank):
    metrics, _ = rank("""
        from types import SimpleNamespace
        from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
        from lightning.pytorch.bar import Tqdm
        connector = _LoggerConnector(SimpleNamespace(global_step=50))
        Tqdm(range(3)).set_postfix(v_num=0, train_loss=0.5)
        assert connector.log_metrics({"train_loss": 0.5}) == "logged"
        connector.log_metrics({"val_loss": 0.25}, step=51)
    """)
    assert metrics == [[50.0, {"train_loss": 0.5}], [51.0, {"val_loss": 0.25}]]


def test_who_reports_or_logs_gets_no_numbers_of_bars_beside_it(rank):
    metrics, _ = rank("""
        from tqdm import tqdm
        from accelerate.accelerator import Accelerator
        bar = tqdm(range(3))
        bar.set_postfix(loss=1)
        Accelerator().log({"loss": 2})
        bar.set_postfix(loss=3)
        report.report(step=1)
        Accelerator().log({"loss": 4})
        report.report(loss=5)
        Accelerator().log({"loss": 6})
        bar.set_postfix(loss=7)
    """)
    assert [row["loss"] for _, row in metrics] == [1, 2, 4, 5]
