"""The tests, by what they need: `unit` no host, the others real hosts, kernels or browsers."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
