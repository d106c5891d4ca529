"""The same notebook or script on every node of a job: node 0 leads, the others find it, prove themselves and serve it.

The way of it, on each node:

    variables           --detect-->              JobNode: the system, this node, all nodes, where node 0 is
    DISTMAGIC_SECRET    --proof-->               one certificate and key, the same on all nodes of the job; or one that
                                                 follows from a file in a shared home
    node 0              --arrivals, meeting-->   listens; waits for the others; a Transport to each
    the others          --following-->           dial node 0; start what it asks for; wait for the outcome

Only node 0 listens, at the first free one of eight ports that follow from the job's name; all others connect. Proof is
TLS 1.3 in which both ends show the certificate that follows from the secret and the job (scrypt, then Ed25519), or from
what node 0 has written to the home. Whoever lacks it is neither obeyed nor answered, on either side, and nodes of another
job count as such. Without either of them a cell ends with an error. Every connection goes in one direction and begins with
a line that says what it is for; a process has two, stdin and stdout.

A follower is to node 0 what an SSH host is: it starts contacts, and they start the node's agent. The launcher runs
unchanged, over one more transport (transports/dialled). At each cell a follower says which cell it is at, and a digest
of it. Node 0 begins when all have come with the same digest, and tells each how it ended and which ranks were its own.

Promised: no node waits for ever. One that doesn't come is named after 20 times `--connect-timeout`; one whose process
ends, or whose connections break, has left. Not promised: that a cell runs where nodes disagree
which cell is next. Nothing here knows of torch, and nothing is started without a proof. In this order:

    job_node.py     what a node knows of its job; reading variables                pure
    torch_variables.py   RANK, WORLD_SIZE, PET_* of somebody else                  pure
    detect.py       which system it is: SkyPilot before the Slurm below it         pure
    addresses.py    where node 0 is dialled
    shared_home.py  a secret in a file of the home
    proof.py        a secret that all nodes have, or a shared home
    arrivals.py     who dials node 0; the head has all messages
    meeting.py      node 0: waits, starts processes, tells the outcome
    following.py    any other node
"""
