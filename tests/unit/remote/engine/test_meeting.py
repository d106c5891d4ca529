"""When a node counts as dead for torch's rendezvous, whatever the clocks of the hosts say."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from distmagic.remote.engine import meeting
from distmagic.remote.engine.meeting import SeenTimes, SteadyTime

PROGRAM = """
import pickle, sys, time
import time
from datetime import datetime, timedelta, timezone
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from distmagic.remote.engine import meeting

class Store:
    name, bits, token = "store", None, 0
    def get_state(self):
        return None if self.bits is None else (self.bits, self.token)
    def set_state(self, bits, token):
        self.bits, self.token = bits, self.token + 1
        return bits, self.token, True

passed_s = 0.0
steady, wall = time.monotonic, datetime
time.monotonic = lambda: steady() + passed_s
other = torchs._NodeDesc("far", 1, 0)
ahead = timedelta(seconds=float(sys.argv[1]))
now = lambda: wall.now(timezone.utc)
if sys.argv[3] == "torch 2.4":
    text = open(torchs.__file__).read()
    exec(text.replace("datetime.now(timezone.utc)", "datetime.utcnow()"), vars(torchs))
    other = torchs._NodeDesc("far", 1, 0)
    now = wall.utcnow
if sys.argv[2] == "ours":
    meeting.count_by_own_clock()

steady_now = meeting.SteadyTime.now if now().tzinfo else meeting.SteadyTime.utcnow
store = Store()
timeout = torchs.RendezvousTimeout(last_call=timedelta(seconds=5))
settings = torchs.RendezvousSettings("j", 2, 3, timeout, timedelta(seconds=1), 5)
here = torchs._BackendRendezvousStateHolder(store, settings, cache_duration=0)

def written(beat, deadline=None):
    state = torchs._RendezvousState()
    state.participants[other] = 0
    state.last_heartbeats[other] = now() + ahead + timedelta(seconds=beat)
    state.deadline = deadline and now() + ahead + timedelta(seconds=deadline)
    store.bits = pickle.dumps(state)

def is_there():
    here.sync()
    return other in here.state.participants

for beat in range(3):
    written(beat)
    print("beats", is_there())
    here.mark_dirty()
    print("written back", is_there())
    passed_s += 4.0
bits = store.bits
passed_s += 2.0
print("silent", is_there())
written(9, deadline=5)
here.sync()
print("waits", here.state.deadline > steady_now())
passed_s += 6.0
written(10, deadline=5)
here.sync()
print("waits", here.state.deadline > steady_now())
"""
RIGHT = [
    *["beats True", "written back True"] * 3,
    "silent False",
    "waits True",
    "waits False",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead_s", "torch"),
    [*((ahead_s, "this torch") for ahead_s in (-3600, 0, 5)), (-5, "torch 2.4")],
)
def test_a_node_is_dead_when_nothing_is_heard_of_it_and_not_by_its_clock(
    torch_forks, tmp_path, ahead_s, torch
):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = torch_forks.run(program, str(ahead_s), "ours", torch)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == RIGHT


def test_a_clock_that_is_set_does_not_change_the_steady_time(monkeypatch):
    passed_s = time.monotonic() - SteadyTime._began_s
    clock = SimpleNamespace(
        monotonic=lambda: SteadyTime._began_s + passed_s + 60.0, time=lambda: 0.0
    )
    before = SteadyTime._began + timedelta(seconds=passed_s)
    monkeypatch.setattr(meeting, "time", clock)
    assert abs(SteadyTime.now() - before - timedelta(seconds=60)).total_seconds() < 0.01


def test_the_wait_for_one_more_node_begins_anew_with_each_round():
    seen = SeenTimes(timedelta(seconds=5), SteadyTime.now)
    first = seen.deadline(SteadyTime.now())
    assert seen.deadline(SteadyTime.now() + timedelta(days=1)) == first
    assert seen.deadline(None) is None
    assert seen.deadline(SteadyTime.now()) > first
