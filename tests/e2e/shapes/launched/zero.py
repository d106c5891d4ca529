"""Arguments of a launcher of its own, and a part of the parameters on each rank, as with DeepSpeed."""
import argparse
import atexit
import csv
import datetime
import importlib.util
import json
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

logger = logging.getLogger("Engine")
logger.setLevel(logging.INFO)
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.propagate = False


def build(name, text):
    """Build an operator once a host: the other processes of the host wait for it."""
    folder = os.path.join(os.environ.get("TORCH_EXTENSIONS_DIR", os.path.expanduser("~/.cache/torch_extensions")), name)
    os.makedirs(folder, exist_ok=True)
    path, baton = os.path.join(folder, f"{name}.py"), FileBaton(os.path.join(folder, "lock"))
    if baton.try_acquire():
        try:
            if not os.path.exists(path):
                with open(path, "w") as file:
                    file.write(text)
        finally:
            baton.release()
    else:
        baton.wait()
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    def __init__(self, args, size):
        local_rank = int(os.environ["LOCAL_RANK"])
        assert args.local_rank in (-1, local_rank)
        with open(args.deepspeed_config) as file:
            self.config = json.load(file)
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        batch = self.config["train_micro_batch_size_per_gpu"] * self.config["gradient_accumulation_steps"] * self.world
        assert self.config["train_batch_size"] == batch, "the batch is not micro batch * accumulation * world"
        self.op = build("fused_step", "def step(part, gradient, lr):\n    part -= lr * gradient\n")
        self.part = torch.zeros(size // self.world)
        atexit.register(self.close)

    def whole(self):
        flat = torch.empty(len(self.part) * self.world)
        dist.all_gather_into_tensor(flat, self.part)
        return flat.requires_grad_()

    def step(self, flat):
        dist.all_reduce(flat.grad)
        mine = (flat.grad / self.world).chunk(self.world)[self.rank]
        self.op.step(self.part, mine, self.config["optimizer"]["params"]["lr"])

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="its own launcher gives it")
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    engine = Engine(args, size=4)
    losses = []
    for step in range(args.steps):
        weights = engine.whole()
        loss = (weights - 1 - engine.rank).square().sum()
        loss.backward()
        engine.step(weights)
        losses.append(loss.item())
        if engine.rank == 0 and (step + 1) % 5 == 0:
            logger.info("[Rank 0] step=%s, skipped=0, lr=[0.1], mom=[0.0], loss=%.4f", step + 1, loss.item())
    if engine.rank == 0:
        with open("loss.csv", "w", newline="") as file:
            csv.writer(file).writerows([step, f"{loss:.6f}"] for step, loss in enumerate(losses))
