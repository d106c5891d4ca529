"""Which numbers of a printed line are taken as those of a training: all that a reader would, and no others."""

import math

import pytest

from distmagic.remote.wire.printed_numbers import may_have_numbers, numbers_of, step_of

# (what programs print, step, numbers)
LINES = [
    ("step 100 loss 2.31", 100, {"loss": 2.31}),
    ("iter 100: loss 2.3100, time 23.1ms, mfu 3.10%", 100, {"loss": 2.31, "mfu": 3.1}),
    ("step 250: train loss 2.1, val loss 2.3", 250, {"train_loss": 2.1, "val_loss": 2.3}),
    ("iter_dt 0.00ms; iter 100: train loss 4.2", 100, {"train_loss": 4.2}),
    ("[GPU0] Epoch 1 | Iter 0 | Train Loss 2.31234", 0, {"train_loss": 2.31234}),
    (
        "step 00019/00020 (95.00%) | loss: 6.23 | lrm: 1.00 | dt: 2.1ms | tok/sec: 1,234 | total time: 0.10m",
        19, {"loss": 6.23, "tok/sec": 1234},
    ),
    ("step    5 | loss: 9.12 | lr 6.0e-04 | norm: 1.23", 5, {"loss": 9.12, "lr": 6e-4, "norm": 1.23}),
    ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.301", 640, {"loss": 2.301}),
    (
        "Epoch: [0][ 10/5005]\tTime  0.5 ( 0.6)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.10 (  0.20)",
        10, {"loss": 6.9, "acc@1": 0.1},
    ),
    ("Epoch [1/5], Step [100/600], Loss: 0.2345", 100, {"loss": 0.2345}),
    ("[0/25][7/1583] Loss_D: 1.6 Loss_G: 4.2 D(x): 0.5", 7, {"loss_d": 1.6, "loss_g": 4.2}),
    ("| epoch   1 |   200/ 2983 batches | lr 5.00 | ms/batch 12.3 | loss  8.12 | ppl  3361.1", 200, {"lr": 5, "loss": 8.12, "ppl": 3361.1}),
    ("loss: 2.301  [   64/60000]", 64, {"loss": 2.301}),
    ("Epoch 3, Loss: 0.5", 3, {"loss": 0.5}),
    (" Accuracy: 65.6%, Avg loss: 1.07", None, {"accuracy": 65.6, "avg_loss": 1.07}),
    ("Test set: Average loss: 0.0561, Accuracy: 9820/10000 (98%)", None, {"average_loss": 0.0561, "accuracy": 0.982}),
    ("Accuracy: 9,820 / 10,000", None, {"accuracy": 0.982}),
    ("val acc 49/50, loss=0.5", None, {"val_acc": 0.98, "loss": 0.5}),
    ("acc=98.2%", None, {"acc": 98.2}),
    ("[120/938] loss=0.5", 120, {"loss": 0.5}),
    ("test_accuracy=1/4", None, {"test_accuracy": 0.25}),
    ("{'loss': 2.3, 'grad_norm': 1.0, 'learning_rate': 4e-05, 'epoch': 0.5}", 0.5, {"loss": 2.3, "grad_norm": 1, "learning_rate": 4e-5}),
    ("INFO:root:step=3 loss=1.5 acc=0.5", 3, {"loss": 1.5, "acc": 0.5}),
    ("Iteration 7, Learning Rate 0.01, Grad Norm: 3.2", 7, {"learning_rate": 0.01, "grad_norm": 3.2}),
    ("loss: tensor(2.31, device='cuda:0')", None, {"loss": 2.31}),
    ("\x1b[32mstep 10\x1b[0m loss \x1b[1m2.5\x1b[0m", 10, {"loss": 2.5}),
    ("train_loss=1.2,val_loss=-inf", None, {"train_loss": 1.2, "val_loss": -math.inf}),
    ("loss 2.31.", None, {"loss": 2.31}),
    ("loss: 0.3 - accuracy: 0.9 *", None, {"loss": 0.3, "accuracy": 0.9}),
]  # fmt: skip
OTHERS = [
    "gradient_acc_steps: 4, loss_scale 128.0",
    "loss 3 times larger, return 0",
    "val loss decreased (0.31 --> 0.20)",
    "epoch 1: 100%|####| 40/40 [00:01<00:00, loss=0.3]",
    "time 12:30:45 error: 404, ERROR: 12 failed",
    "reducing learning rate of group 0 to 1.0000e-02.",
    "return code: 0x1, loss: 1.2.3, acc 12:30, lr: 3e-4x, ppl 5/7",
    "    return 0.5 - x",
    "[120/938]",
    "batch acc [120/938]",
    "accuracy 11/10, acc: 3/0, acc: 0.5/3, acc 1/2/3, acc 5/7s, loss: 1/2, lr 3/4",
    "acc = 3/4 * weight",
    "    loss = 0.5 * (a - b)",
    "loss: 0.5\rloss: 0.4",
    "Loading weights: 100 of 200 files",
    "loss " * 100 + "0.5",
]


@pytest.mark.parametrize(("line", "step", "numbers"), LINES)
def test_a_line_of_a_training(line, step, numbers):
    assert may_have_numbers(line.encode())
    assert numbers_of(line) == numbers
    assert step_of(line) == step


def test_a_loss_that_is_no_number():
    assert math.isnan(numbers_of("step 3: loss nan")["loss"])


@pytest.mark.parametrize("line", OTHERS)
def test_another_line_has_none(line):
    assert numbers_of(line) == {}
