"""What is left of a run, for the user to look at. Nothing here starts, follows or ends a job; a host is asked for files only.

run.py        Run: what a cell's variable gets
results.py    what its ranks returned, by rank
detached.py   what stands in the variable where there is no run: Detached
shown.py      the same as a cell's value
"""
