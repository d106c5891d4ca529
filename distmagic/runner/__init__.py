"""One run from its start to its end, and what is left of it. All threads of a run are here."""
