import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    x = torch.rand(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.print(f"processes {accelerator.num_processes}, steps {len(loader)}")
    bar = tqdm(range(args.num_epochs * len(loader)), disable=not accelerator.is_local_main_process)
    step = 0
    for _ in range(args.num_epochs):
        for source, target in loader:
            loss = torch.nn.functional.mse_loss(model(source), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(1)
            step += 1
            accelerator.log({"train_loss": loss.detach().item()}, step=step)
    mean = accelerator.gather(loss.detach().reshape(1)).mean()
    accelerator.print(f"mean of {accelerator.num_processes}: {mean < 10}")
    accelerator.wait_for_everyone()
    accelerator.save_state(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
