"""Starts torchrun and its ranks on a host: by exec, or by a fork of a template, which is a process
with torch loaded.

The engine of a node is the process that runs torchrun on it: a child of the agent, and the parent
of the ranks. It runs torchrun's own code with a few functions replaced, and resets forked processes
to the state of new ones. It holds no state of a job, writes no journal and runs no code of the user
(a rank starts in the package rank). Read in this order:

    engine_start.py      the agent's side: starts torchrun, by exec or by fork
    engine.py            the process that runs torchrun; reports how ranks ended
    meeting.py           how long a node counts as alive in a c10d rendezvous
    forking.py           `fork`, and how a child resets itself to the state of a new process
    spare_ranks.py       forks ranks for torchrun, before it has threads
    huge_pages.py        makes forks of the template faster
    process_title.py     the command line and the job's mark of a forked process in /proc
    preloading.py        the packages that a template loads besides torch
"""
