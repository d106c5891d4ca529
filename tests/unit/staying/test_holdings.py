"""What ranks that stay have, in the words of `%distributed stay`."""

from __future__ import annotations

import torch

from distmagic.remote.training import inventory
from distmagic.remote.training.inventory import Inventory
from distmagic.staying import holdings


def test_tensors_models_and_optimizers_have_their_shape_place_and_size():
    model = torch.nn.Linear(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    values = {
        "model": model,
        "optimizer": optimizer,
        "x": torch.ones(2, 10, dtype=torch.float64),
        "n": 3,
    }
    found = inventory.of(values, ["model", "n", "optimizer", "gone", "x"])
    assert found == Inventory(
        names=(
            ("model", "Linear, 33 parameters on cpu", 132),
            ("n", "int", 0),
            ("optimizer", "SGD", 132),
            ("x", "Tensor [2, 10] float64 on cpu", 160),
        ),
        gpu=None,
    )


def test_the_largest_names_have_a_line_and_ranks_with_equal_memory_share_one(golden):
    names = (
        ("model", "Net, 12 parameters on cuda:0", 48_000_000),
        *((f"x{number}", "Tensor [1] float32 on cuda:0", 4) for number in range(4)),
        ("step", "int", 0),
        ("lr", "float", 0),
    )
    gpu = (1_200_000_000, 2_000_000_000, 80_000_000_000)
    found = {rank: Inventory(names=names, gpu=gpu) for rank in range(3)}
    more = ("logits", "Tensor [9] float32 on cuda:0", 36)
    found[3] = Inventory(names=(*names, more), gpu=(5_000_000_000, *gpu[1:]))
    golden(*holdings.lines(found))
    assert holdings.lines({0: Inventory(names=(), gpu=None)}) == []


def test_a_module_without_sizes_yet_costs_no_other_name_its_line():
    values = {"lazy": torch.nn.LazyLinear(3), "n": 3}
    found = inventory.of(values, ["lazy", "n"])
    assert found.names == (("lazy", "LazyLinear", 0), ("n", "int", 0))
