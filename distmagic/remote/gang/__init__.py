"""Heartbeats between the agents of one job, by which each node learns that another node stopped or is lost.

The gang of a job is the group of all its agents, which tell each other whether they still run.
Here: sealed UDP datagrams, the state of every peer, and the question whether this node must stop because of another
one. Never here: no process is started or ended (the agent does that), nothing is sent to the notebook except by the
journal, and no data of the user travels. Read in this order:

    datagrams.py        the bytes of one datagram, and its seal
    liveness.py         `Gang`: datagrams and the clock in, news and datagrams out; pure
    udp.py              the socket
    channel.py          `GangChannel`: what the agent uses; turns news into journal events and reasons to stop
    elastic_members.py  which hosts the lead of an elastic job has admitted, and as which nodes

Theory of operation
===================

The nodes form a star. Node 0, the lead, exchanges datagrams with every member; a member exchanges them with the lead
only. Every node sends its phase every `PERIOD_S` (more often where `lost_after_s` is short). The lead also answers each
datagram of a member at once. Every datagram carries a counter, and as `echo` the highest counter that its sender has
received from the addressee.

A node says one of three phases about itself. Only its own agent moves it on, and never back:

    up        --the agent begins to end the job, for any cause-->  stopping
    stopping  --no process of the job is left on the node-->       clear

With "stopping" and "clear" go the reason and the node to blame. A member that hears them from the lead stops for the
same reason. The lead that hears them from a member stops too, which tells all other members: so each end reaches every
node in two steps.

Each node keeps one state for each of its peers:

    ""      --the peer echoes one of our datagrams-->                            joined
    ""      --`FORM_S` pass without that-->                                      silent
    silent  --the peer echoes one of our datagrams-->                            joined
    joined  --the last datagram that it echoed was sent `lost_after_s` ago-->    lost, unless its phase is clear
    lost    --the peer echoes a newer datagram-->                                joined (reported as "back")

So "joined" needs a round trip: the peer has received a datagram that we sent at a time known by our own clock. Clocks
of different hosts are never compared.

What a loss leads to is decided in channel.py:

- A member that loses the lead stops: without the lead there is no rendezvous.
- The lead of a job with a fixed number of nodes stops, and so all stop.
- The lead of an elastic job that still has `min_nodes` nodes goes on. It raises `formations`; every agent that sees the
  number rise kills its older ranks, which wait for the lost node for ever, and torchrun starts them anew. Where all ranks
  of a node have returned, its agent ends torchrun, which would wait for the lost node's end for minutes; the lead's does
  so when the other nodes have ended.
- "silent" stops nobody. Some firewall drops UDP; each node then depends on its own lease.
- "back" stops nobody and restores nothing. A lost host comes back as a new node, with a number of its own.

Each node also says whether all its ranks have returned, and the lead whether those of any node have. torchrun can't start
ranks again with such a node. So where a rank has failed that may be started again, and is not, its agent stops a job with
a fixed number of nodes, also when no notebook follows it (see `RestartWait`). The lead of an elastic job takes in no host
while a node has returned.

While ranks are asked to end, each node also says whether one of them is about to, and the lead whether one of any node
is. Nodes whose ranks wait in C for such a rank wait with it; where there is none on any node, all are killed.

The lead also says in each datagram whether the job is detached. Every host then lists it so, whichever of them a notebook
can reach, and no node depends on a lease any more.

An agent exits only when `may_leave` says so, so that its last datagrams are not missed:

- A member leaves when the lead has echoed a datagram that says "clear", or when the lead has been silent for
  `lost_after_s`. A member that never received a datagram leaves once it has sent "clear".
- The lead leaves when every member that it has ever heard, and not lost, has said "clear".

Promised: a datagram that is forged, changed, cut, replayed, or meant for another job or node changes nothing. Two nodes
that had joined notice within `lost_after_s` plus one period that the way between them is cut, both of them.

Not promised: that any one datagram arrives, or that datagrams arrive in order. A host that has the job's secret is
trusted. More than `MOST_NODES` nodes are not counted.
"""
