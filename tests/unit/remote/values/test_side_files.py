"""Large values of a parcel in files of their own: what is split off, that it comes back, and that it keeps its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.values import parcel, side_files
from distmagic.remote.values.seen import Seen
from tests.builders.later import Later

torch, np = Later("torch"), Later("numpy")

MB = 1 << 20


def split(value: object, folder: Path) -> tuple[Path, Seen]:
    """Write a value, and return its parcel and what was noted."""
    seen = Seen()
    path = folder / "value"
    size = parcel.dump(value, path, seen=seen, beside=folder)
    assert size == path.stat().st_size
    assert {file.name for file in folder.iterdir()} == {
        "value",
        *(side_file.sha256 for side_file in seen.side_files),
    }
    for side_file in seen.side_files:
        file = folder / side_file.sha256
        assert (file.stat().st_size, file.stat().st_mode & 0o777) == (
            side_file.size_bytes,
            0o600,
        )
    return path, seen


# ---- which values share a file


@given(st.lists(st.integers(0, 4 * MB), max_size=300))
def test_every_value_has_one_place_and_side_files_are_large(sizes):
    groups = side_files.grouped(sizes)
    numbers = [number for group in groups for number in group]
    assert len(set(numbers)) == len(numbers)
    assert len(groups) <= side_files.AT_MOST
    assert all(
        sum(sizes[n] for n in group) >= side_files.LARGE_BYTES for group in groups
    )
    left = sum(size for n, size in enumerate(sizes) if n not in numbers)
    assert left < max(side_files.LARGE_BYTES, 2 * sum(sizes) / side_files.AT_MOST)


def test_large_values_stand_alone_and_small_ones_share():
    assert side_files.grouped([]) == []
    assert side_files.grouped([MB - 1]) == []
    assert side_files.grouped([MB, 5, 2 * MB]) == [[0], [2]]
    assert side_files.grouped([400_000, 3 * MB, 400_000, 0, 400_000, 7]) == [
        [1],
        [0, 2, 4],
    ]


def test_there_are_never_very_many():
    assert len(side_files.grouped([MB] * 10_000)) <= side_files.AT_MOST
    # 16 MiB are large beside 1 GiB.
    assert side_files.grouped([1000 * MB, *[MB] * 20]) == [[0], [*range(1, 17)]]


# ---- there and back


def test_tensors_arrays_bytes_and_text_come_back(tmp_path):
    value = {
        "tensor": torch.arange(MB, dtype=torch.float32),
        "array": np.arange(MB, dtype=np.int16),
        "bytes": os.urandom(2 * MB),
        "text": "é" * MB,
        "bytearray": bytearray(3 * MB),
        "small": [torch.ones(3), np.ones(3), b"small"],
    }
    path, seen = split(value, tmp_path)
    assert len(seen.side_files) == 5
    assert path.stat().st_size < 10_000
    back = parcel.load(path)
    assert torch.equal(back["tensor"], value["tensor"])
    assert (back["array"] == value["array"]).all()
    assert all(back[name] == value[name] for name in ("bytes", "text", "bytearray"))
    assert back["small"][0].eq(1).all()
    back["tensor"].fill_(7)
    back["array"][:] = 7
    # A change is private.
    assert torch.equal(parcel.load(path)["tensor"], value["tensor"])


def test_views_share_their_memory_again(tmp_path):
    large = torch.zeros(MB)
    path, _ = split([large, large[10:20]], tmp_path)
    back = parcel.load(path)
    back[0].fill_(5)
    assert back[1].eq(5).all()


def test_many_parameters_share_side_files(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(100)))
    path, seen = split(model.state_dict(), tmp_path)
    assert 1 <= len(seen.side_files) <= 4
    back = parcel.load(path)
    assert all(
        torch.equal(back[name], tensor) for name, tensor in model.state_dict().items()
    )


def test_what_has_not_changed_keeps_its_name(tmp_path):
    tensor, data = torch.randn(MB), os.urandom(MB)
    _, first = split(["a line", tensor, data], tmp_path)
    _, second = split(["a longer line, and one more", data, tensor], tmp_path)
    assert set(first.side_files) == set(second.side_files)
    assert first.sha256.hexdigest() != second.sha256.hexdigest()
    tensor[5] = 1
    third = Seen()
    parcel.dump([tensor, data], tmp_path / "third", seen=third, beside=tmp_path)
    assert len(set(third.side_files) & set(first.side_files)) == 1


def test_without_a_folder_all_is_in_one_file(tmp_path):
    parcel.dump([torch.zeros(MB), bytes(2 * MB)], tmp_path / "value")
    assert [file.name for file in tmp_path.iterdir()] == ["value"]
    assert len(parcel.load(tmp_path / "value")[1]) == 2 * MB


# ---- what goes wrong


def test_a_side_file_that_is_missing_or_cut(tmp_path, golden):
    path, seen = split(torch.zeros(MB), tmp_path)
    (side_file,) = seen.side_files
    file = tmp_path / side_file.sha256
    os.truncate(file, 100)
    with golden.raises(parcel.ParcelError):
        parcel.load(path)
    file.unlink()
    with golden.raises(parcel.ParcelError):
        parcel.load(path)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"windows":[[0,', b'"windows":[[9,'), (b",0]]", b",1]]")]
)
def test_a_table_that_points_outside(tmp_path, old, new, golden):
    path, _ = split(torch.zeros(MB), tmp_path)
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    with golden.raises(parcel.ParcelError):
        parcel.load(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(MB),
        lambda: bytes(4 * MB),
        lambda: [bytes(2 * MB), bytes(2 * MB)],
    ],
    ids=["tensor", "bytes", "list"],
)
def test_the_limit_counts_side_files_too_and_nothing_is_left(tmp_path, make):
    value = make()
    with pytest.raises(parcel.TooLarge) as caught:
        parcel.dump(value, tmp_path / "value", limit_bytes=3 * MB, beside=tmp_path)
    assert caught.value.size_bytes >= 4 * MB
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error_and_leaves_nothing_half(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        parcel.dump(torch.zeros(MB), tmp_path / "value", beside=tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
