"""Subcommands and a file of settings, as `LightningCLI` has them, and a trainer that finds out itself who started it."""
import argparse
import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

log = logging.getLogger("lightning")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler())


class Elastic:
    """The environment in which torchrun starts a process."""

    def __init__(self):
        assert "TORCHELASTIC_RUN_ID" in os.environ, "nobody has started the other processes"
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.node_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])


class Trainer:
    def __init__(self, max_epochs, devices, num_nodes, limit_train_batches):
        self.env = Elastic()
        assert devices * num_nodes == self.env.world, "trainer.devices and trainer.num_nodes are not those of the job"
        assert self.env.rank == self.env.node_rank * devices + self.env.local_rank
        self.max_epochs, self.batches = max_epochs, limit_train_batches

    def set_up(self, settings):
        if self.env.rank == 0:
            log.info("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/%s", self.env.world)
        dist.init_process_group("gloo")
        logs = Path("lightning_logs")
        numbers = [int(path.name.removeprefix("version_")) for path in logs.glob("version_*")]
        version = [max(numbers, default=-1) + 1]
        dist.broadcast_object_list(version, src=0)
        self.folder = logs / f"version_{version[0]}"
        if self.env.rank == 0:
            self.folder.mkdir(parents=True)
            (self.folder / "config.json").write_text(json.dumps(settings))

    def fit(self, model):
        module = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        bar = tqdm(total=2, desc="Sanity Checking", leave=False)
        for _ in range(2):
            bar.update()
        bar.close()
        for epoch in range(self.max_epochs):
            bar = tqdm(total=self.batches, desc=f"Epoch {epoch}", disable=self.env.rank != 0)
            for batch in range(self.batches):
                optimizer.zero_grad()
                loss = (module(torch.ones(4, 2)) - 1).square().mean()
                loss.backward()
                optimizer.step()
                bar.update()
                bar.set_postfix(train_loss=loss.item(), v_num=0)
            bar.close()
            if self.env.rank == 0:
                torch.save(model.state_dict(), self.folder / f"epoch={epoch}-step={(epoch + 1) * self.batches}.ckpt")
        dist.barrier()
        if self.env.rank == 0:
            log.info("`Trainer.fit` stopped: `max_epochs=%s` reached.", self.max_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    fit = parser.add_subparsers(dest="subcommand", required=True).add_parser("fit")
    fit.add_argument("--config", required=True)
    fit.add_argument("--trainer.max_epochs", dest="max_epochs", type=int)
    args = parser.parse_args()
    settings = json.loads(Path(args.config).read_text())
    if args.max_epochs is not None:
        settings["trainer"]["max_epochs"] = args.max_epochs
    torch.manual_seed(settings["seed_everything"])
    os.environ["PL_GLOBAL_SEED"] = str(settings["seed_everything"])
    trainer = Trainer(**settings["trainer"])
    trainer.set_up(settings)
    trainer.fit(torch.nn.Linear(2, 1))  # it leaves its process group to the end of the process
