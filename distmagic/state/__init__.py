"""Folds the events of a run into its state, and decides what follows from the state.

All modules are pure: events and times are arguments, and values are returned. No module starts a
thread, reads a clock, contacts a host or writes to a screen. Read the modules in this order:

    phases.py           the phases of nodes, ranks and runs; the meaning of each stop reason
    events.py           the events of the launcher, and the envelope of all events
    model.py            `RunState` with its `NodeState`s and `WorkerState`s
    series.py           the points of one metric of one rank
    progress.py         whether a rank has advanced, and whether a run hangs
    builder.py          a mutable state, used only within one call of `fold`
    fold.py             `fold`: makes the next state from events; handles events of agents
    fold_ranks.py       handles events of ranks, and which node has which ranks
    fold_launcher.py    handles events of the launcher
    explanation.py      where the ranks are, in words: groups, sentences, advice, stacks
    hangs.py            groups the ranks by their stacks and calls, which makes an `Explanation`
    standstill.py       ranks without progress; requests for their stacks before a stop
    decide.py           decides: stop the run, mark nodes as lost, request stacks, detach the job
    verdict.py          the exception of a finished run, if it failed

Theory of operation
===================

A run has one `RunState`. Only `fold(state, events)` makes the next one. There are two senders of
events:

- The **launcher** (this notebook) sends events about its own actions and observations: events.py.
- The **agents** (one for each node) send events about their hosts: remote/wire/events.py. An
  agent's events are numbered. The launcher folds each exactly once and in order, even after a
  broken connection. Events of different nodes come in any order. A host may be faulty, but is not
  hostile. Its lines are limited and its texts are sanitized, no event makes `fold` raise, and
  nodes' reports about their ranks are trusted.

A node
------
`NodeState.phase` only moves forward; it may skip phases.

    phase        begins with the event                           sender
    connecting   (the state of a new node)
    connected    Connected                                       launcher
    sending      Sending                                         launcher
    starting     Starting; Hello                                 launcher; agent
    running      Worker, for the node's first rank               agent
    ended        EngineEnded: torchrun ended, `code` is set      agent
    clear        Final: no process is left except `survivors`    agent
                 Swept: the same, after the agent was lost       launcher
    gone         Gone: the agent has ended, all events arrived   launcher

In addition to its phase, a node may be

- *unusable* (Unusable, launcher): it can't take part. Then nothing starts.
- *waited for* (Waiting, launcher): another job has its devices. Nothing starts until they are free.
- *broken* (Broken, until Mended; launcher): there is no connection now. Its ranks run on.
- *stopping* (NodeStopping, agent): its agent is ending its ranks, for a reason.
- *silent*, *joined* or *lost* by its heartbeats (PeerState: the lead reports about all nodes, a
  member about the lead).
- *accused* (PeerState "lost", or NodeStopping because of it, from another node): its heartbeats
  don't arrive. This ends when the node itself reports why it stops, or its heartbeats return.
- *lost* (an entry in `RunState.lost`), for one of the reasons below. Only PeerState "back" undoes a
  loss, in an elastic job also "joined"; the loss of a node that runner/node_table.py has given up
  stays. A node that is gone can't become lost; a lost one may still become gone, if its own last
  events arrive after all.

Why a node is lost, and which code decides it (decide.py and fold.py are in this package,
node_table.py in runner/, osmo/ in systems/):

    it was out of reach for 10 s, while others were not      decide.py, `overdue`
    it leads an elastic job, all others ended because they
    missed its heartbeats, and it was out of reach for 10 s  decide.py, `overdue`
    the others miss its heartbeats, and it sends no event    decide.py, `missed_by_peers`
    it did not confirm its end after a stop                  decide.py, `after_step`
    the others miss its heartbeats, in an elastic job: at
    once, because the lead continues without it, so its
    own events are not awaited                               fold.py, `_accuse`
    its agent ended without a last event, or crashed         node_table.py, `_link_ended`
    it sent an invalid event, or following it met a bug      node_table.py, `_link_ended`
    its host has another key, or connecting met a bug        node_table.py, `_attempt_failed`
    there was no connection for the time of the lease        node_table.py, `due`
    it should join an elastic job, and was not started       node_table.py, `due`
    it should join, and its start failed                     node_table.py, `_join_failed`
    it should join, and the run was being stopped            node_table.py, `_add_row`
    it should join, its host did not answer, and no
    connection came for 20 s; its start is unconfirmed, and
    it may run                                               node_table.py, `due`
    it joined from a host that this notebook doesn't know    node_table.py, `_pass_over`
    OSMO ended the workflow without success                  osmo/workflow.py, `_finish`

A rank
------
    (its node sends Worker)--> running --Ended-----------------> done | failed | stopped
                               running --(its node is lost)----> lost
                               running --(its node's Final)----> stopped

A rank is in `workers` from its first Worker on. It is *failed* if it ended with an error and was
not asked to end. It is *stopped* if torchrun, an agent or this notebook ended it. `first_failure`
is the rank that failed first, with two exceptions. A rank that only lost a peer ("connection closed
by peer") is replaced by a rank whose own failure arrives within two seconds, or that SIGKILL ended
before its node stopped. A rank that SIGTERM ended becomes stopped if torchrun then reports that
another rank's process on its node failed after its return. torchrun may restart a rank (Worker with
a higher `restart`), or start it on another node in a later round of the rendezvous. Then the old
failure no longer counts.

A rank belongs to the node that reports it in the latest round of the rendezvous: fold_ranks.py.

The run
-------
`RunState.phase` is computed from the other fields. While the run is not over:

    stopping                        `stopping` is set
    running                         a rank has started
    waiting                         the run waits for devices of a host
    connecting, sending, starting   the phase of the slowest node

`is_over`: every node is gone or lost, or `abandoned` is set. Then the phase is *failed* with a
`first_failure`. Otherwise the reason of the stop makes it *lost*, *failed* or *stopped*. Without a
stop it is *done* if torchrun ended with 0 on each essential node, else *failed*.

`stopping` is set once and never changes: by StopRequested (launcher), by the first NodeStopping of
an agent, or by Abandoned if the user wished it. The first of these gives the run's reason.

Fields that only occur together
-------------------------------
- `abandoned`: the run ended before it had started on all hosts. `stopping` is "interrupted" or ""
  then.
- `culprit`: only with `stopping`, and only if the nodes decided it among themselves.
- `first_failure`: always a key of `workers`; that rank's phase is failed.
- `failed_node`: its `code` is not 0. It was set before any stop, or it is the `culprit`, or it
  undid a first failure.
- `lost`: each node at most once. `unreached`: only nodes that sent Endpoint "unreached"; kept if
  that ends the run.
- `paused`: only running ranks. If it is empty, no rank has waited since `resumed_at_s`.
- `is_elastic`: from the terms of the plan. Nodes are only added (NodeAdded, lead), never removed.

Promised: the phase of a node never moves back. A run whose nodes are all gone or lost is over. The
state does not depend on the order of events of different nodes, with three exceptions: the order of
lines and notices, which of two failures came first, and reports of a rank before a later round
assigned it to another node. Not promised: clocks of hosts may differ (times are the notebook's).
The logs on the hosts have more lines than the state. A lost node may still run processes.
"""
