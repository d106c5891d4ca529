"""Heartbeats between the agents of one job, by which each node learns that another node stopped or
is lost.

The gang of a job is the group of all its agents. They send each other authenticated UDP datagrams,
track the state of every peer, and decide whether a node must stop because of another one. The
package starts and ends no process (the agent does that). It reports to the notebook only through
the journal, and sends no data of the user. Read in this order:

    datagrams.py        the bytes of one datagram, and its authentication code
    liveness.py         `Gang`: datagrams and the clock in, news and datagrams out; pure
    udp.py              the socket
    channel.py          `GangChannel`: the agent's interface; turns news into events of the journal
                        and reasons to stop
    elastic_members.py  which hosts the lead of an elastic job has admitted, and as which nodes

Theory of operation
===================

The nodes form a star. Node 0, the lead, exchanges datagrams with every member; a member exchanges
them with the lead only. Every node sends its phase every `PERIOD_S` (more often if `lost_after_s`
is short). The lead also answers each datagram of a member at once. Every datagram carries a
counter, and as `echo` the highest counter that its sender has received from the addressee.

A node sends one of three phases. Only its own agent changes its phase, and never back:

    up        --the agent begins to end the job, for any cause-->  stopping
    stopping  --no process of the job is left on the node-->       clear

"stopping" and "clear" carry the reason and the node that caused it. A member that receives them
from the lead stops for the same reason. A lead that receives them from a member stops too, and its
datagrams stop all other members. So every stop reaches every node in two steps.

Each node keeps one state for each of its peers:

    ""      --the peer echoes one of our datagrams-->            joined
    ""      --`FORM_S` pass without that-->                      silent
    silent  --the peer echoes one of our datagrams-->            joined
    joined  --its last echo is of a datagram that was            lost, unless its phase is clear
              sent `lost_after_s` ago-->
    lost    --the peer echoes a newer datagram-->                joined (reported as "back")

So "joined" needs a round trip: the peer has received a datagram whose sending time this node's own
clock recorded. Clocks of different hosts are never compared.

channel.py decides what follows from a loss:

- A member that loses the lead stops: without the lead there is no rendezvous.
- The lead of a job with a fixed number of nodes stops, and so all stop.
- The lead of an elastic job that still has `min_nodes` nodes continues. It increases `formations`.
  Every agent that sees the new number kills its older ranks, which would wait forever for the lost
  node, and torchrun restarts them. If all ranks of a node have returned, its agent ends torchrun,
  which would wait minutes for the lost node. The lead's agent does so once the other nodes have
  ended.
- "silent" stops no node. A firewall may drop UDP; each node then depends on its own lease.
- "back" stops no node and restores nothing. A lost host rejoins as a new node with a new number.

Each node also sends whether all its ranks have returned, and the lead sends whether this is so on
any node. torchrun can't restart ranks together with such a node. So if a failed rank could be
restarted but is not, its agent stops a job with a fixed number of nodes (see `RestartWait`). The
lead of an elastic job admits no new host once a node has returned.

After ranks were asked to end, each node also sends whether one of its ranks is about to end. The
lead sends whether this is so on any node. Nodes whose ranks are blocked in C code wait for such a
rank; if no node has one, all ranks are killed.

Each datagram of the lead also carries whether the job is detached. Then every host lists it as
detached, and no node depends on a lease.

An agent exits only when `may_leave` returns True, so that its last datagrams have arrived:

- A member leaves when the lead has echoed a datagram that says "clear", or when the lead has been
  silent for `lost_after_s`. A member that never received a datagram leaves once it has sent
  "clear".
- The lead leaves when every member that it has received datagrams from, and not lost, has sent
  "clear".

Promised: a datagram that is forged, changed, cut, replayed, or meant for another job or node
changes nothing. If the network between two joined nodes is cut, both notice within `lost_after_s`
plus one period.

Not promised: that any one datagram arrives, or that datagrams arrive in order. A host that has the
job's secret is trusted. More than `MOST_NODES` nodes are not counted.
"""
