"""The agent: one process for each node of a job, which starts torchrun, collects what ranks send,
and ends every process.

The agent runs a job on one node from torchrun's start to the last process. It is the only writer of
the node's journal. One thread runs one loop over a selector; a second thread only measures the
hardware, and one asks NCCL about a job that stands still. The agent uses no SSH, no torch and no
blocking call, and runs no code of the user. Read in this order:

    main.py          the process: its signals, its beginning and its end
    agent.py         `Agent`: the loop, torchrun's start and end, and the requests of notebooks
    ending.py        `NodeEnd`: every decision to stop, and the steps until no process is left
    patience.py      how long a job runs on without a notebook, a cell or a restart of ranks; pure
    rank_table.py    all ranks of the node: accepts them, journals their progress and their ends
    rank_process.py  one rank: its socket, its progress, its exit
    rank_stream.py   one pipe of a rank: log and output events
    reader.py        the connection of one notebook: sends the journal, receives requests
    reader_table.py  all these connections: accepts them, closes those that are gone or read nothing
    polite_stop.py   asks ranks to end by themselves, and waits for them
    termination.py   SIGTERM, grace time, SIGKILL, until no process is left
    stack_dump.py    collects the stack traces of all ranks
    hardware_watch.py  measures the load of the host
    endpoint.py      connects to the rendezvous endpoint: a closed port is reported within seconds

Theory of operation
===================

An agent is in one of four states. It only ever moves down this list:

    running  from `begin` on: torchrun has been started
    ending   `termination.has_begun`: processes get SIGTERM, and SIGKILL after a grace time. If
             nothing has failed (`POLITE_REASONS`) only torchrun gets the signal, and the job sets
             the grace time
    final    `final_at` is set: no process of the job is left, and `Final` is in the journal
    gone     `run` has returned, and the process exits

running -> ending, on whichever comes first, with this reason:

    a notebook sends `StopNode`                                 the reason in the message
    the agent gets SIGTERM                                      "the agent was asked to end"
    a peer stops, or is lost (see the package gang)             the peer's reason, or "lost"
    a rank failed, and torchrun may not restart it              "failed"
    it may, but waits for a node whose ranks have all returned  "failed" (not elastic)
    the lead's `timeout_s` is over                              "timeout"
    ranks that stay had no cell for the lead's `ends_idle_s`    "idle"
    nobody renewed the lease of a job that needs a notebook     "lease"
    torchrun has exited: with an error, by a signal, or well    "failed", "lost" (elastic), none

Then the agent closes the standard input of all ranks: otherwise a debugger that waits for a line
would delay the end.

The first cause is journaled as `NodeStopping` and sent to the peers; later causes change nothing.
`Final` has the reason for which the processes were ended, or "done" if torchrun had already exited
by itself.

ending -> final: no descendant of the agent is left, and torchrun's exit code is known. The agent is
a subreaper (prctl), so every orphan of the job becomes its child. `Final.survivors` names a process
that survives SIGKILL for 10 s, because it is in a system call of the kernel.

final -> gone: the peers need no more datagrams of this node (`GangChannel.may_leave`), and each
reader has received the whole journal. The agent does not wait for a reader that has read nothing
for 5 s. Once the lease has expired it waits for no reader: the contact sends the missing events
from the journal on disk.

An OSError outside of all this (a removed folder, a silent NFS server, no free descriptor) only ends
the affected connection or log. It is journaled as a `Notice`, and the job continues. Any other
exception is a bug in distmagic: the agent kills all its descendants and exits with a traceback,
whose last line the notebook shows.

The lease is a countdown that every request of a reader restarts. With `keep`, or after a
`DetachJob`, its end does not end the job. Once the agents exchange heartbeats (package gang), only
the lead has a lease; the other nodes depend on the lead.

Promised: an event is on disk before any reader gets it, unless the disk is full. When `Final` is
written, every process of the job has ended or is named. If the agent is killed, torchrun and ranks
die with it (PR_SET_PDEATHSIG). Processes that they had started are ended at the next contact to
this host; the job's mark in their environment identifies them.

Not promised: that any notebook reads the journal; that processes end after they have changed their
user (setuid).
"""
