import os

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    print(f"{cfg.model.name} lr={cfg.lr} total={total.item()} cwd={os.getcwd()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
