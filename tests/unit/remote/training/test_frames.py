"""What a rank keeps of the frames of its exception: small values whole, others described, within room and time."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distmagic.remote.training import frames
from distmagic.remote.training.frames import Frames, KeptFrame
from distmagic.remote.values import parcel
from tests.builders.later import Later
from tests.lab.waiting import HANG_S

torch = Later("torch")
SCALE = 3


def of(work: Callable[[], object]) -> Frames:
    with pytest.raises(ZeroDivisionError) as failed:
        work()
    return frames.of(failed.value.__traceback__, lambda file: file, None)


def value(kept: Frames, frame: KeptFrame, name: str) -> object:
    data = kept.values[{**frame.global_names, **frame.local_names}[name]]
    return data if isinstance(data, str) else parcel.load_bytes(data, name)


def fails(batch: object, deep: int = 0) -> object:
    lock = threading.Lock()
    if deep:
        return fails(batch, deep - 1)
    with lock:
        return SCALE / 0


def test_each_frame_has_its_place_its_source_and_its_names():
    kept = of(lambda: fails({"x": [1, 2]}, deep=1))
    outer, inner = kept.frames[-2:]
    assert (outer.name, inner.name, inner.file) == ("fails", "fails", __file__)
    assert inner.source.splitlines()[inner.line - inner.first_line].strip() == "return SCALE / 0"  # fmt: skip
    assert value(kept, inner, "batch") == {"x": [1, 2]}
    assert value(kept, inner, "SCALE") == 3
    assert value(kept, inner, "lock") == "lock"
    # One value under two names is kept once.
    assert outer.local_names["batch"] == inner.local_names["batch"]


def test_a_tensor_that_is_too_large_is_described():
    kept = of(lambda: fails([torch.ones(3), torch.zeros(300_000)]))
    small = of(lambda: fails(torch.ones(3)))
    large = of(lambda: fails(torch.zeros(300_000)))
    assert value(kept, kept.frames[-1], "batch") == "list"
    assert value(large, large.frames[-1], "batch") == "Tensor [300000] float32 on cpu"
    assert torch.equal(value(small, small.frames[-1], "batch"), torch.ones(3))


class Raises:
    def __reduce__(self) -> str:
        raise SystemError


def test_what_can_not_be_pickled_is_described():
    kept = of(lambda: fails(Raises()))
    assert value(kept, kept.frames[-1], "batch") == "Raises"


def test_the_innermost_frames_are_kept():
    kept = of(lambda: fails(1, deep=100))
    assert len(kept.frames) == 40
    assert kept.frames[-1].local_names.keys() == {"batch", "deep", "lock"}


def test_all_values_together_fit_into_a_file_that_is_sent_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(frames, "_PATIENCE_S", HANG_S)
    space: dict[str, object] = {f"x{n}": bytes(100_000) for n in range(20)}
    space["lr"] = 0.5
    with pytest.raises(ZeroDivisionError) as failed:
        exec("1 / 0", {}, space)
    found = frames.of(failed.value.__traceback__, str, None)
    assert parcel.dump(found, tmp_path / "x") <= frames.LARGEST_BYTES
    whole = [one for one in found.values if isinstance(one, bytes)]
    assert len(whole) >= 6
    # A value that comes after large ones has room.
    assert value(found, found.frames[-1], "lr") == 0.5


def test_the_source_of_a_function_is_kept_once_however_deep_it_has_called_itself(
    tmp_path,
):
    lines = "".join(f"    a{n} = {'x' * 200!r}\n" for n in range(100))
    names: dict[str, Any] = {}
    source = f"def deep(n):\n{lines}    return deep(n - 1) if n else 1 / 0\n"
    linecache.cache["deep.py"] = (len(source), None, source.splitlines(True), "deep.py")  # fmt: skip
    exec(compile(source, "deep.py", "exec"), names)
    kept = of(lambda: names["deep"](50))
    assert kept.frames[-1].source.endswith("1 / 0\n")
    assert parcel.dump(kept, tmp_path / "x") < 200_000


def test_values_are_described_once_the_time_is_over(monkeypatch):
    monkeypatch.setattr(frames, "_PATIENCE_S", -1.0)
    kept = of(lambda: fails(5))
    assert value(kept, kept.frames[-1], "batch") == "int"


@pytest.mark.parametrize(
    ("answers", "is_read"),
    [
        pytest.param([False, False, True], True, id="it-comes-to-its-end"),
        pytest.param([False] * 100_000, False, id="it-waits-for-ever"),
    ],
)
def test_a_tensor_of_a_device_is_read_where_the_device_has_done_its_work(
    monkeypatch, answers, is_read
):
    """The device is a played one: its stream answers what the test says."""
    monkeypatch.setattr(frames, "_PATIENCE_S", HANG_S if is_read else 0.2)
    asked: list[object] = []
    waiting = iter(answers)

    def current_stream(device: object) -> object:
        asked.append(device)
        return SimpleNamespace(query=lambda: next(waiting))

    played = SimpleNamespace(current_stream=current_stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=played))
    device = SimpleNamespace(type="npu", index=1)
    assert frames._Keeper(None)._may_read([device]) is is_read
    assert set(map(id, asked)) == {id(device)}  # not the current one's stream


def test_a_tensor_that_is_too_large_is_waited_for_on_no_device(monkeypatch):
    asked: list[object] = []
    large = torch.empty(300_000, device="meta")
    window = SimpleNamespace(storage=large, nbytes=1_200_000)
    monkeypatch.setattr(parcel.Packer, "plan", lambda _: ([], [window], []))
    with pytest.raises(parcel.TooLarge):
        parcel.dump_bytes(1, 400_000, None, lambda devices: bool(asked.append(devices)))
    assert asked == []


class NamesAnotherClass:
    @property
    def __class__(self):  # type: ignore[override]
        raise SystemExit("a property")

    def __reduce__(self) -> str:
        raise RuntimeError


def test_a_description_calls_no_code_of_the_users_class():
    kept = of(lambda: fails(NamesAnotherClass()))
    assert value(kept, kept.frames[-1], "batch") == "NamesAnotherClass"
