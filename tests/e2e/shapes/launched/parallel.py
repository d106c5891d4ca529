"""A block that makes the process group and ends it, an engine with handlers, and a bar an epoch, as with Ignite."""
import logging
import sys

import torch
import torch.distributed as dist
from tqdm import tqdm


def set_up_logger(name):
    logger = logging.getLogger(name)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    return logger


class Parallel:
    def __init__(self, backend):
        self.backend = backend

    def __enter__(self):
        dist.init_process_group(self.backend, init_method="env://")
        self.logger = set_up_logger("launcher.Parallel")
        self.logger.info("Initialized distributed launcher with backend: '%s'", self.backend)
        return self

    def run(self, function, *args, **words):
        function(dist.get_rank(), *args, **words)
        self.logger.info("End of run")

    def __exit__(self, *_):
        dist.barrier()
        dist.destroy_process_group()


class Engine:
    def __init__(self, process):
        self.process, self.handlers = process, {}
        self.epoch = self.iteration = self.output = 0

    def on(self, event):
        return lambda handler: self.handlers.setdefault(event, []).append(handler) or handler

    def fire(self, event):
        for handler in self.handlers.get(event, ()):
            handler(self)

    def run(self, data, max_epochs):
        self.length, self.max_epochs = len(data), max_epochs
        for self.epoch in range(1, max_epochs + 1):
            self.fire("epoch started")
            for batch in data:
                self.output = self.process(batch)
                self.iteration += 1
                self.fire("iteration completed")
            self.fire("epoch completed")


def training(local_rank, config):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def process(batch):
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(process)
    if local_rank == 0:

        @trainer.on("epoch started")
        def begin(engine):
            engine.bar = tqdm(total=engine.length, desc=f"Epoch [{engine.epoch}/{engine.max_epochs}]", leave=False)

        @trainer.on("iteration completed")
        def advance(engine):
            engine.bar.set_postfix({"batch loss": engine.output})
            engine.bar.update()

        @trainer.on("epoch completed")
        def end(engine):
            engine.bar.close()
            engine.bar = None
            torch.save(model.module.state_dict(), f"best_model_{engine.epoch}.pt")

    trainer.run([torch.ones(4, 2)] * 3, config["max_epochs"])


def run(backend="gloo", max_epochs=2):
    with Parallel(backend) as parallel:
        parallel.run(training, {"max_epochs": int(max_epochs)})


if __name__ == "__main__":  # as fire calls it: a function, and --name=value
    words = dict(word.removeprefix("--").split("=") for word in sys.argv[2:])
    {"run": run}[sys.argv[1]](**words)
