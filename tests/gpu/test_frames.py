"""The debugger of a run whose rank has failed with tensors on a GPU: they come to the CPU, unless the GPU still computes."""

from __future__ import annotations

import pytest

from distmagic.api import session
from distmagic.errors import WorkerFailed


def fails(cycles: int) -> None:
    import torch

    x = torch.arange(4.0, device="cuda")
    large = torch.zeros(1_000_000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    raise ValueError(f"{tuple(x.shape)}, {tuple(large.shape)}")


@pytest.mark.parametrize(
    ("cycles", "shown"),
    [
        pytest.param(1_000, "tensor([0., 1., 2., 3.])", id="at-rest"),
        pytest.param(
            10**10, "<left out: Tensor [4] float32 on cuda:0>", id="it-computes"
        ),
    ],
)
def test_a_debugger_has_the_tensors_of_a_gpu(
    gpus, run, monkeypatch, capsys, cycles, shown
):
    lines = ["p x", "p large", "q"]
    monkeypatch.setattr("builtins.input", lambda *_: lines.pop(0))
    with pytest.raises(WorkerFailed):
        run(fails, cycles, hosts="node1:1")
    capsys.readouterr()
    session().failed_runs.debug("", None)
    said = capsys.readouterr().out
    assert shown in said
    assert "<left out: Tensor [1000000] float32 on cuda:0>" in said
