"""How busy hosts and GPUs are, as a user reads it; what nothing tells of is shown as such."""

from __future__ import annotations

import re
from dataclasses import replace

from distmagic import render
from tests.scenes import on_gpus, over, ranks_1024, running


def cells(html: str, table: int) -> list[list[str]]:
    """Return the texts of a table's cells, by row."""
    body = html.split("<table")[table + 1]
    rows = []
    for row in body.split("<tr")[1:]:
        found = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
        rows.append([re.sub("<[^>]+>", "", cell) for cell in found])
    return rows


def test_a_rank_has_its_own_gpu_and_what_is_not_told_is_shown_as_such():
    _, html = render.head_and_table(on_gpus())
    head, *ranks = cells(html, 0)
    place = head.index("GPU")
    texts = [row[place] for row in ranks]
    assert texts == ["87%, 62.1/80.0 GB, 71 °C", "12.0/80.0 GB", "-", "-"]
    assert "87%, 62.1/80.0 GB, 71 °C" in render.text(on_gpus(), width=200)


def test_a_host_has_cpu_memory_and_network():
    _, html = render.head_and_table(on_gpus())
    assert cells(html, 1) == [
        ["host", "CPU", "memory", "network", "GPUs"],
        ["gpu-a", "43%", "31.0/256.0 GB", "1.2 MB/s in, 340 kB/s out", "mean 87%, fullest 62.1/80.0 GB, hottest 71 °C"],
        ["gpu-b", "-", "31.0/256.0 GB", "-", "-"],
    ]  # fmt: skip


def test_a_run_that_is_over_keeps_the_peaks_alone():
    _, html = render.head_and_table(over(on_gpus()))
    assert html.count("<table") == 1
    assert "at most 79.0/80.0 GB" in html
    assert "71 °C" not in html


def test_without_news_nothing_is_said():
    _, html = render.head_and_table(running())
    assert "GPU" not in html
    assert html.count("<table") == 1


def test_many_hosts_are_folded_and_have_what_is_worst_of_their_gpus():
    state = ranks_1024()
    told = on_gpus().nodes[0].hardware
    nodes = tuple(replace(node, hardware=told) for node in state.nodes)
    state = replace(state, nodes=nodes)
    _, table = render.head_and_table(state)
    assert "dm-hardware" not in table
    assert "mean 87%, fullest 62.1/80.0 GB, hottest 71 °C" in table
    folded = render.all_ranks(state)
    assert "<summary>hardware of 64 of 128 hosts</summary>" in folded
    assert folded.count("31.0/256.0 GB") == 64
