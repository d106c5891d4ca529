"""What a user keeps of a run.

Nothing in this package starts, follows or ends a job; it only reads files from hosts.

run.py        Run: the value of a cell's variable
results.py    the return values of its ranks
post_mortem.py  pdb where a rank has failed, in copies of its frames
detached.py   Detached: the value of the variable when the job runs on without the notebook
shown.py      shows these as a cell's value
"""
