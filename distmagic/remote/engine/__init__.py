"""How torchrun and its ranks come to be on a host: started by exec, or forked from a template that has torch loaded.

The engine of a node is the process that runs torchrun there: a child of the agent, and the parent of the ranks.
Here: torchrun's own code runs, in a process of its own, with a few of its functions replaced; forked processes become as
fresh as new ones. Never here: nothing of a job's state, no journal, no user code (a rank begins in the package rank).
Read in this order:

    engine_start.py      the agent's side: starts torchrun, by exec or by fork
    engine.py            the process that is torchrun; reports how ranks ended
    meeting.py           how long a node that meets others by c10d counts as alive
    forking.py           `fork`, and what a child does to become like a new process
    rank_fork_server.py  forks ranks for torchrun, before it had threads of its own
    process_title.py     the command line and the job's mark that /proc shows of a forked process
    preloading.py        which packages a template has beside torch, and how they are loaded
"""
