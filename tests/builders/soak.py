"""Runs of every kind, as cells of one notebook: good ones with small and large results, failed and interrupted ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Ending = Literal["done", "failed", "interrupted"]

PREPARE = """\
import os
import time
import torch
import distmagic

def small():
    for step in range(20):
        distmagic.report(step=step + 1, total=20, loss=1 / (step + 1))
    print("a line of output")
    return {"loss": 0.5}

def large():
    return torch.ones(1_000_000)

def fails():
    raise ValueError("enough")

def waits():
    open(os.path.expanduser("~/begun"), "w").close()
    time.sleep(600)
"""
# What is free in a process goes back to the system. Which of glibc's arenas a passing buffer was in is a matter of chance,
# and each arena keeps some of it for the next one.
TRIM = "import ctypes; ctypes.CDLL(None).malloc_trim(0)"
BEGUN = (
    "begun"  # the file in a host's home that says that there is something to interrupt
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A cell's call, how it ends, and what a cell after it looks at."""

    call: str
    ending: Ending
    look: str


SMALL = Run(
    call="small()",
    ending="done",
    look="run.results[0]['loss'], len(run.logs(0)), len(run.metrics)",
)
# 4 MB: fetched for this look, and mapped.
LARGE = Run(call="large()", ending="done", look="float(run.results[0].sum())")
FAILED = Run(call="fails()", ending="failed", look="run.state.phase")
# On a busy machine a rank may begin before the notebook knows that its host has started.
INTERRUPTED = Run(call="waits()", ending="interrupted", look="repr(run)")
MIX = (SMALL, LARGE, SMALL, FAILED, SMALL, SMALL, INTERRUPTED, LARGE, SMALL, SMALL)
