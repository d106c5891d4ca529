import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Words(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 50
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    args = TrainingArguments(
        output_dir="out", use_cpu=True, report_to=[], logging_steps=1, max_steps=4, per_device_train_batch_size=2,
        save_steps=4,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Words())
    result = trainer.train()
    print("world", args.world_size, "steps", result.global_step)
