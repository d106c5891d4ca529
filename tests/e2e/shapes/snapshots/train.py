"""Data parallel training that goes on from its last snapshot."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from datautils import RandomPairs
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.model, self.data, self.optimizer = model, data, optimizer
        self.save_every, self.snapshot_path = save_every, snapshot_path
        self.first_epoch = 0
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            self.model.load_state_dict(snapshot["model"])
            self.first_epoch = snapshot["epochs"]
            print(f"Resuming training from snapshot at epoch {self.first_epoch}")
        self.model = DDP(self.model)

    def run_epoch(self, epoch):
        self.data.sampler.set_epoch(epoch)
        print(f"[rank {self.rank}] epoch {epoch} | steps: {len(self.data)}")
        for source, target in self.data:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(source), target)
            loss.backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(self.first_epoch, epochs):
            self.run_epoch(epoch)
            if self.local_rank == 0 and (epoch + 1) % self.save_every == 0:
                snapshot = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
                torch.save(snapshot, self.snapshot_path)


def main(epochs, save_every, batch_size, snapshot_path="snapshot.pt"):
    dist.init_process_group("gloo")
    dataset = RandomPairs(256)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, data, optimizer, save_every, snapshot_path).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    args = parser.parse_args()
    main(args.epochs, args.save_every, args.batch_size)
