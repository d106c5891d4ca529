"""The terms on which a job runs, and states of runs on other terms."""

from __future__ import annotations

from dataclasses import replace

from distmagic.remote.wire.protocol import JobTerms
from distmagic.state.model import RunState


def terms(max_restarts: int = 0, min_nodes: int = 0) -> JobTerms:
    """Return the terms of a job; with `min_nodes` it is elastic."""
    return JobTerms(
        lease_s=60.0,
        max_restarts=max_restarts,
        min_nodes=min_nodes,
        max_nodes=8 if min_nodes else 0,
    )


def on_terms(state: RunState, **terms: object) -> RunState:
    """Return a state of which these terms are others."""
    return replace(state, terms=replace(state.terms, **terms))  # type: ignore[arg-type]
