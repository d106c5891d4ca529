"""The directory of a keeper's socket, among those of other keepers."""

import os
import secrets
import shutil
from pathlib import Path

from distmagic.remote.keeper import listening


def test_a_keeper_that_ends_while_another_one_looks_is_no_hindrance(monkeypatch):
    start = f"distmagic-{os.getuid()}-slurm."
    node = f".{secrets.token_hex(8)}"
    monkeypatch.setattr(os, "listdir", lambda _: [f"{start}1{node}"])
    folder = f"/tmp/{start}2{node}"
    listener = listening.listen(folder, node)
    try:
        assert Path(folder, "keeper").exists()
    finally:
        listener.close()
        shutil.rmtree(folder)
