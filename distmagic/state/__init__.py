"""Folds the events of a run into its state, and says what follows from that state.

Everything here is pure: events and the clock's readings come in by argument, values go out. Nothing here has a thread,
reads a clock, speaks to a host or writes on a screen. Read the modules in this order:

    phases.py           the phases of nodes, ranks and runs; what each reason of a stop means
    events.py           the events of the launcher, and the envelope of all events
    model.py            `RunState` with its `NodeState`s and `WorkerState`s
    series.py           the points of one metric of one rank
    builder.py          a state that can be changed, alive within one call of `fold`
    fold.py             `fold`: events in, the next state out; the events of agents
    fold_ranks.py       the events of ranks, and which node has which ranks
    fold_launcher.py    the events of the launcher
    hangs.py            whether a run hangs, and where its ranks are, in words
    standstill.py       which ranks have stood still for long; the question where they are, before a stop for it
    decide.py           what to do: stop the run, count nodes as lost, ask ranks where they are, let the job go on alone
    verdict.py          the error that a run ends with, if it does

Theory of operation
===================

A run has one `RunState`. `fold(state, events)` is the only function that makes the next one. There are two senders:

- The **launcher** (this notebook) tells what it does and sees itself: events.py.
- The **agents** (one a node) tell what happens on their hosts: remote/wire/events.py. An agent's events are numbered.
  The launcher folds each exactly once and in order, also after a broken connection. Events of different nodes come in
  any order. A listed host may break, but it does not lie: its lines are bounded and its texts are sanitized, no event
  makes `fold` raise, and who has which rank is what the nodes report.

A node
------
`NodeState.phase` only goes forward; it may leave phases out.

    phase        begins with the event                           sender
    connecting   (the state of a new node)
    connected    Connected                                       launcher
    sending      Sending                                         launcher
    starting     Starting; Hello                                 launcher; agent
    running      Worker, for the node's first rank               agent
    ended        EngineEnded: torchrun is over, `code` is set    agent
    clear        Final: no process is left but `survivors`       agent
                 Swept: the same, after the agent was lost       launcher
    gone         Gone: the agent is gone, all events are here    launcher

Beside the phase, a node may be

- *unusable* (Unusable, launcher): it can't take part. Nothing starts then.
- *waited for* (Waiting, launcher): another job has devices of it. Nothing starts until they are free.
- *broken* (Broken, until Mended; launcher): there is no connection just now. Its ranks go on.
- *stopping* (NodeStopping, agent): its agent ends its ranks, for this reason.
- *silent*, *joined* or *lost* in the gang (PeerState, from the lead of any node, from a member of the lead).
- *accused* (PeerState "lost", or NodeStopping because of it, from another node): the others don't hear it. It is taken
  back when the node itself tells why it stops, or is heard again.
- *lost* (an entry in `RunState.lost`), for one of the reasons below. Only PeerState "back" takes a loss back, in an
  elastic job "joined" too; the loss of a node that runner/node_table.py has given up stays. A node that is gone can't
  become lost; one that is lost may still be gone, where its own last events come after all.

Why a node is lost, and where that is decided:

    it was out of reach for 10 s, and others were not            decide.py, `overdue`
    it leads an elastic job, all others ended without hearing
    it, and it was out of reach for 10 s                         decide.py, `overdue`
    the others don't hear it, and it says nothing itself         decide.py, `missed_by_peers`
    it did not confirm its end after a stop                      decide.py, `after_step`
    the others don't hear it, in an elastic job                  fold.py, `_accuse`: at once, for the lead goes on
                                                                 without it, so nobody waits for its own word
    its agent ended without a last event, or broke down          runner/node_table.py, `_link_ended`
    it sent what is no event, or following it met a bug          runner/node_table.py, `_link_ended`
    its host has another key, or connecting met a bug            runner/node_table.py, `_attempt_failed`
    there was no connection for the lease                        runner/node_table.py, `due`
    it was to join an elastic job, and never began               runner/node_table.py: nobody has started it (`due`), its
                                                                 start failed (`_join_failed`), or the run was being
                                                                 stopped (`_add_row`)
    it was to join, and its host could not be asked              runner/node_table.py, `due`: its start was not answered,
                                                                 and no connection came for 20 s; it may run
    it joined from a host that this notebook doesn't know        runner/node_table.py, `_pass_over`
    OSMO ended the workflow otherwise than well                  systems/osmo/workflow.py, `_last_words`

A rank
------
    (its node tells Worker)--> running --Ended-----------------> done | failed | stopped
                               running --(its node is lost)----> lost
                               running --(its node's Final)----> stopped

A rank is in `workers` from its first Worker on. It *fails* if it ended badly and nobody asked it to end. It is
*stopped* if torchrun, an agent or this notebook ended it. `first_failure` is the rank that failed first. Two
exceptions: a rank that only lost a peer ("connection closed by peer") gives way to a rank whose own failure arrives
within two seconds; and a rank that SIGTERM ended was stopped after all, if torchrun reports then that the process of a
rank beside it had failed after its return. torchrun may start a rank again (Worker with a higher `restart`), or on
another node in a later round of the rendezvous: then the old failure counts no more.

A rank belongs to the node that reports it in the latest round of the rendezvous: fold_ranks.py.

The run
-------
`RunState.phase` follows from the rest; it is not kept. While the run is not over:

    stopping                        `stopping` is set
    running                         a rank is beyond starting
    waiting                         the run waits for devices of a host
    connecting, sending, starting   what the node that is least far does

`is_over`: every node is gone or lost, or `abandoned` is set. Then, in this order: *failed* with a `first_failure`,
*lost*, *failed* or *stopped* by the reason of the stop, *done* if torchrun ended with 0 on each essential node, else
*failed*.

`stopping` is set once and never changes: by StopRequested (launcher), by the first NodeStopping of an agent, or by
Abandoned if the user wished it. The first reason of all is the run's.

Fields that only occur together
-------------------------------
- `abandoned`: the run ended before it had begun on all hosts. `stopping` is "interrupted" or "" then.
- `culprit`: only with `stopping`, and only where the nodes found out among themselves.
- `first_failure`: always a key of `workers`; that rank's phase is failed.
- `failed_node`: its `code` is not 0. It was set before any stop, or it is the `culprit`, or it took a first failure
  back.
- `lost`: each node at most once. `unreached`: only nodes that tell Endpoint "unreached"; kept if that is why it stops.
- `paused`: only ranks that run. Since `resumed_at_s` there is none, unless it is not empty.
- `is_elastic`: its terms are, from the plan on. Nodes are only ever added (NodeAdded, lead), never removed.

Promised: the phase of a node never goes back; a run whose nodes are all gone or lost is over; the state does not depend
on how the events of different nodes were mixed, but for the order of lines and notices, for which of two failures came
first, and for what a rank reported on one node before a later round gave it to another. Not promised: that clocks of hosts agree (times are the notebook's); that
every line of output is here (the logs on the hosts have more); that a node which is lost runs nothing any more.
"""
