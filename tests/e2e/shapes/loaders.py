"""A DataLoader whose workers are started in each of Python's ways; the data set is defined here."""
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return index * index, os.getpid()


def main():
    dist.init_process_group("gloo")
    for method in sys.argv[1:]:
        loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method)
        values, pids = zip(*[(value.sum().item(), set(pid.tolist())) for value, pid in loader])
        total = torch.tensor(float(sum(values)))
        dist.all_reduce(total)
        pids = set().union(*pids)
        assert os.getpid() not in pids and len(pids) == 2
        print(method, total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
