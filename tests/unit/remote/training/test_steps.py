"""Ranks that stop after the same step: real ones with gloo, and one alone without torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distmagic.remote.rank.report import track
from distmagic.remote.training import steps
from tests.builders import gloo_ranks
from tests.lab.waiting import HANG_S

AGREED = """
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(200, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
in_step = 0
for number in range(40):
    steps.begin()
    def control():
        own = Words()
        own.hear(f"stop {number}")
        own.say(f"{number}/{rank}", str(steps.ask(100)["steps"]))
        highest = max(int(own.hear(f"{number}/{other}")) for other in range(WORLD))
        assert steps.stop_at("step", highest + 1)
    thread = in_a_thread(control)
    count = 0
    try:
        while True:
            if rank == number % WORLD and count == 3 + 7 * number % 11:
                words.say(f"stop {number}")
            loss = model(torch.randn(32, 200)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count += 1
    except KeyboardInterrupt as stop:
        made = int(str(stop).removeprefix("stopped after step "))
        assert made == count + 1
    thread.join()
    found = [None] * WORLD
    weights = sum(float(one.sum()) for one in model.parameters())
    dist.all_gather_object(found, (made, weights, groups.calls()))
    in_step += len(set(found)) == 1
print(in_step)
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_that_agree_on_a_step_stay_in_step_whenever_they_are_interrupted(
    compiler_forks, tmp_path
):
    """The model and its group go on: each of 40 rounds uses those of the round before."""
    seen = gloo_ranks.run(compiler_forks, tmp_path, 3, AGREED)
    assert seen == [["40"]] * 3


WHICH = """
weight = torch.nn.Parameter(torch.ones(2))
def sgd():
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)
def counted(act):
    steps.begin()
    act()
    return steps.ask(0)["steps"]
print("a step:", counted(lambda: sgd().step()))
thread = lambda: in_a_thread(lambda: sgd().step()).join()
print("of another thread:", counted(thread))
def in_backward():
    fused = sgd()
    handle = weight.register_post_accumulate_grad_hook(lambda _: fused.step())
    weight.sum().backward()
    handle.remove()
print("within backward:", counted(in_backward))
class Outer(torch.optim.Optimizer):
    def __init__(self):
        self.inner = sgd()
        super().__init__([weight], {})
    def step(self):
        self.inner.step()
        print("the rest of the outer step", end=" ")
outer = Outer()
steps.begin()
steps.ask(100)
steps.stop_at("step", 1)
try:
    outer.step()
except KeyboardInterrupt as stop:
    print(stop)
child = os.fork()
if child == 0:
    steps.ask(100)
    sgd().step()
    os._exit(0)
print("a child goes on:", os.waitpid(child, 0)[1] == 0)
os._exit(0)
"""


@pytest.mark.slow
def test_which_steps_count_and_that_none_is_stopped_within_another(
    torch_forks, tmp_path
):
    [seen] = gloo_ranks.run(torch_forks, tmp_path, 1, WHICH)
    assert seen == [
        "a step: 1",
        "of another thread: 0",
        "within backward: 0",
        "the rest of the outer step stopped after step 2",
        "a child goes on: True",
    ]


@pytest.fixture
def rank(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "_counting", steps._Counting())
    steps._counting.thread = threading.get_ident()
    yield
    steps.go_on()


def test_where_no_optimizer_steps_iterations_count(rank, monkeypatch):
    monkeypatch.setattr("distmagic.remote.rank.report._here.link", _Nobody())
    done = []

    def loop() -> None:
        for item in track(range(10)):
            done.append(item)
            if item == 1:
                assert steps.ask(HANG_S)["iterations"] == 1
                assert steps.stop_at("iteration", 3)

    with pytest.raises(KeyboardInterrupt, match="iteration 3"):
        loop()
    assert done == [0, 1, 2]


def test_a_rank_waits_after_its_next_step_until_it_has_an_answer(rank):
    steps.iterated()
    assert steps.ask(HANG_S)["iterations"] == 1
    # Nothing of the main thread's can happen before: it waits, and this answers it.
    answer = threading.Timer(0.01, steps.stop_at, ("iteration", 4))
    answer.start()
    steps.iterated()
    steps.iterated()
    with pytest.raises(KeyboardInterrupt):
        steps.iterated()
    steps.iterated()  # it is over


def test_a_rank_without_an_answer_goes_on_and_takes_none_later(rank):
    steps.ask(patience_s=0.01)
    steps.iterated()
    assert not steps.stop_at("iteration", 2)
    steps.iterated()
    steps.iterated()


def test_a_rank_goes_on_when_it_is_let_go_and_past_the_step_it_takes_no_answer(rank):
    steps.ask(HANG_S)
    go_on = threading.Timer(0.01, steps.go_on)
    go_on.start()
    steps.iterated()
    go_on.join()
    steps.iterated()
    steps.ask(HANG_S)
    assert not steps.stop_at("iteration", 1)
    assert not threading.Thread(target=steps.iterated).start()  # of another thread
    assert steps.ask(0)["iterations"] == 2


class _Nobody:
    """The other end of reports that nobody reads."""

    inbox: list[object] = []  # noqa: RUF012

    def pump(self) -> None:
        self.inbox.clear()
