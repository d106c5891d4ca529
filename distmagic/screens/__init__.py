"""Puts a run where a user looks: a notebook, a terminal, or a log."""
