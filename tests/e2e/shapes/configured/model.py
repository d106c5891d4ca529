from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Config:
    vocab_size: int = 50
    block_size: int = 8
    n_embd: int = 8


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, x, y):
        logits = self.head(self.tokens(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
