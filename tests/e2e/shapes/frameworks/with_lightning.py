import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        loss = torch.nn.functional.mse_loss(self.layer(source), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(1)
    x = torch.rand(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=2, log_every_n_steps=1, logger=False,
        default_root_dir="out", enable_model_summary=False,
    )
    trainer.fit(Regression(), data)
    print("world", trainer.world_size, "steps", trainer.global_step)
