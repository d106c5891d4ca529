"""Names of nodes in brackets, written out."""

import pytest

from distmagic.systems.slurm.nodelist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ""),
        ("a", "a"),
        ("a,b", "a b"),
        ("a[1-3]", "a1 a2 a3"),
        ("a[1-3,07-10]b[1-2],c", "a1b1 a1b2 a2b1 a2b2 a3b1 a3b2 a07b1 a07b2 a08b1 a08b2 a09b1 a09b2 a10b1 a10b2 c"),
        ("x[1-2][1-2]", "x11 x12 x21 x22"),
        ("gpu[008-011]", "gpu008 gpu009 gpu010 gpu011"),
        ("n[9-11]-ib,login", "n9-ib n10-ib n11-ib login"),
        ("cn-1.site,cn-2.site", "cn-1.site cn-2.site"),
    ],
)  # fmt: skip
def test_expand(text, names):
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    [
        "a[1-2",
        "a]",
        "a[]",
        "a[1-]",
        "a[b]",
        "a[3-1]",
        ",a",
        "a,",
        "a,,b",
        "a[1-2]]",
        f"{'node-' * 20}[",
    ],
)
def test_what_is_no_list_is_an_error(text, golden):
    with golden.raises(ValueError):
        expand(text)


@pytest.mark.parametrize("text", ["a[1-999999999]", "a[1-1000][1-1000]"])
def test_no_list_fills_the_memory(text, golden):
    with golden.raises(ValueError):
        expand(text)
