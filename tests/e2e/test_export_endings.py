"""Exported cells end well in each form; a node ends when the other one has failed. `export_endings.py` runs many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.export_endings import FORMS, export


@pytest.mark.parametrize("is_bundle", [False, True], ids=["text", "call"])
@pytest.mark.parametrize("form", FORMS)
def test_a_cell_that_trains_on_gloo_ends_well(
    tmp_path: Path, form: str, is_bundle: bool
) -> None:
    ended = export(form, tmp_path / "out", is_bundle=is_bundle).run()
    assert [code for code, _ in ended] == [0, 0], ended
    for place, (_, printed) in enumerate(ended):
        assert f"rank {place} has trained" in printed


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("fails at once", "Node 1 has failed. This node ends its ranks."),
        ("is killed", "Node 1 has failed. The ranks of this one ended well."),
    ],
)
def test_a_node_ends_when_the_other_one_has_failed(
    tmp_path: Path, ending: str, words: str
) -> None:
    ended = export("torchrun-static", tmp_path / "out", ending=ending).run()
    assert [code for code, _ in ended] == [1, 1], ended
    assert words in ended[0][1]


@pytest.mark.parametrize("ending", ["fails at once", "is killed"])
def test_with_c10d_both_nodes_end_too(tmp_path: Path, ending: str) -> None:
    """The nodes number themselves: where the one that failed has the store, the other one's ranks may fail first."""
    ended = export("torchrun-c10d", tmp_path / "out", ending=ending).run()
    codes = sorted(code for code, _ in ended)
    assert codes[1] == 1, ended
    assert codes[0] in (0, 1), ended  # 0: all was done there
