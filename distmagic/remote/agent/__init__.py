"""The agent: one process for each node of a job, which starts torchrun, collects what ranks send, and ends every process.

Here: one thread with one loop over a selector, beside one that only looks at the hardware; the life of a job on one
node from torchrun's start to the last process; the only writer of the node's journal. Never here: no SSH, no user code,
no import of torch, no blocking call. Read in this order:

    main.py          the process: its signals, its beginning and its end
    agent.py         `Agent`: the loop, and every decision to stop
    lease.py         how long a job goes on without a notebook; pure
    restart_wait.py  how long torchrun waits in vain to start ranks again; pure
    rank_table.py    all ranks of the node: accepts them, journals their progress, notices their ends
    rank_process.py  one rank: its socket, its progress, its exit
    rank_stream.py   one pipe of a rank: log and output events
    reader.py        the connection of one notebook: sends it the journal, takes its requests
    reader_table.py  all of them: accepts them, drops those that are gone or take nothing
    polite_stop.py   ranks are asked to end by themselves, and waited for while one may do so
    termination.py   SIGTERM, grace time, SIGKILL, until no process is left
    stack_dump.py    collects the stacks of all ranks
    hardware_watch.py  how busy the host is
    endpoint.py      dials the rendezvous endpoint, so that a closed port is reported within seconds

Theory of operation
===================

An agent is in one of four states. It only ever moves down this list:

    running  from `begin` on: torchrun has been started
    ending   `termination.has_begun`: processes get SIGTERM, and SIGKILL after a grace time. Where nothing has failed
             (`POLITE_REASONS`) torchrun gets the signal in place of all, and the grace is the job's
    final    `final_at` is set: no process of the job is left, and `Final` is in the journal
    gone     `run` has returned, and the process exits

running -> ending, by whichever comes first:

    a notebook sends `StopNode`                                       the reason that it names
    the agent gets SIGTERM                                            "the agent was asked to end"
    a peer stops, or is lost (see the package gang)                   the peer's reason, or "lost"
    a rank failed, and torchrun may not restart it                    "failed"
    it may, but waits for a node whose ranks have all returned        "failed" (not elastic)
    the lead's `timeout_s` is over                                    "timeout"
    nobody renewed the lease of a job that needs a notebook           "lease"
    torchrun has exited: with an error, by a signal, or well          "failed", "lost" (elastic), none

Then the standard input of all ranks is brought to its end: a debugger that waits for a line would hold up the end.

The first cause is journaled as `NodeStopping` and sent to the peers; later ones change nothing. `Final` has the reason
for which the processes were ended, "done" where torchrun had exited by itself before.

ending -> final: no descendant of the agent is left, and torchrun's exit code is known. The agent is a subreaper (prctl),
so that every orphan of the job becomes its child and is found. A process that survives SIGKILL for 10 s, in a system
call of the kernel, is named in `Final.survivors`.

final -> gone: the peers may miss this node (`GangChannel.may_leave`), and each reader has received the whole journal.
The agent does not wait for a reader that has taken nothing for 5 s, nor for any once the lease has run out: the contact
completes the events from the journal on disk.

An OSError outside of all this (a folder that was removed, a server of the home that does not answer, no descriptor left)
costs the connection or the log concerned, and is journaled as a `Notice`; the job goes on. Any other exception is a
fault of ours: the agent kills all its descendants and exits with a traceback, whose last line the notebook shows.

The lease is a countdown that every request of a reader restarts, whichever it is. With `keep`, and after a `DetachJob`,
its end no longer ends the job. Where a gang channel has formed only the lead has a lease; the others depend on the lead.

Promised: an event is on disk before any reader gets it, unless the disk is full. When `Final` is written every process
of the job has ended, or is named. If the agent is killed, torchrun and ranks die with it (PR_SET_PDEATHSIG); what they
had started is ended at the next contact to this host, by the job's mark in its environment.

Not promised: that any notebook reads the journal. That the processes of a user who becomes another one (setuid) end.
"""
