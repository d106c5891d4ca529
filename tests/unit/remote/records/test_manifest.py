"""The list of files: written and read again, and nothing that leads out of its folder."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.records import manifest
from distmagic.remote.records.manifest import Manifest


def test_what_a_manifest_owns():
    found = Manifest(owned=("pkg", "mod.py"))
    assert [
        path for path in ("pkg/a", "pkg", "pkg2", "mod.py", "x") if found.owns(path)
    ] == ["pkg/a", "pkg", "mod.py"]
    assert Manifest(owned=("",)).owns("anything")
    assert not Manifest().owns("anything")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "", ".", "a/./b", "a\0b"]
)
@pytest.mark.parametrize("where", ["files", "links", "folders"])
def test_a_path_that_leads_out_is_refused(path, where, golden):
    rows = {"files": [[path, 0, 1, 0]], "links": [[path, "x"]], "folders": [path]}
    found = {
        "packs": ["a" * 64],
        "files": [],
        "links": [],
        "folders": [],
        "owned": [],
        where: rows[where],
    }
    with golden.raises(ValueError):
        manifest.decode(zlib.compress(json.dumps(found).encode()))


@given(st.binary(max_size=200) | st.binary(max_size=200).map(zlib.compress))
def test_any_bytes_are_a_manifest_or_a_value_error(data):
    with pytest.raises(ValueError):
        manifest.decode(data)
