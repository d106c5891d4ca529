"""Runs the same notebook or script on every node of a job: node 0 leads, and the other nodes find
it and authenticate.

What happens on each node:

    variables         --detect-->             JobNode: the system, this node, all nodes, the address
                                              of node 0
    DISTMAGIC_SECRET  --proof-->              one certificate and key, the same on all nodes of the
                                              job; without the variable, derived from a file in a
                                              shared home
    node 0            --meeting-->            listens; waits for the others; a Transport to each
    the other nodes   --following-->          connect to node 0; start what it asks for; wait for
                                              the outcome

Only node 0 listens. It takes the first free one of eight ports, which are derived from the job's
name; all other nodes connect. Both ends authenticate by TLS 1.3 with the same certificate. It is
derived (scrypt, then Ed25519) from the secret and the job, or from a file that node 0 writes to a
shared home. A peer without it gets no answer, and so does a node of another job. If a node has
neither a secret nor a shared home, the cell ends with an error. Every connection sends data in one
direction, and its first line names its purpose. A process has two connections, stdin and stdout.

Node 0 treats a follower like an SSH host: the follower starts contacts, which start the node's
agent. The launcher runs unchanged over one more transport (transports/dialled). At each cell a
follower sends the cell's number and a digest of its text. Node 0 starts the run when all nodes have
sent the same digest. At the end it sends each node the outcome and the numbers of its ranks.

Promised: no node waits forever. An error names a node that has not arrived after 20 times
`--connect-timeout`. A node whose process ends, or whose connections break, counts as gone. Not
promised: a cell does not run if nodes disagree which cell is next. No module uses torch, and no
process starts before the peer has authenticated. Read in this order:

    job_node.py     this node's place in its job; reads variables                  pure
    torch_variables.py   RANK, WORLD_SIZE, PET_* set by another launcher           pure
    detect.py       detects the system; SkyPilot takes precedence over its Slurm   pure
    addresses.py    the address of node 0
    shared_home.py  a secret in a file in the home directory
    proof.py        makes the certificate from the secret or from the shared home
    meeting.py      node 0: accepts connections, waits for nodes, starts processes, sends the
                    outcome; its first comment lists all messages
    following.py    every other node
"""
