"""Finds faults of hosts and of the network between them, for `%distributed doctor`.

All modules are pure: answers of hosts go in, findings, a table, text and HTML come out.
session/doctor.py asks the hosts. A finding may name a command as its cure, but only the user runs
it. Read in this order:

    finding.py    a finding, and what was read from a host
    of_host.py    faults of a single host
    among.py      differences between hosts that should be equal
    gpus.py       faults of GPUs, and of the torch that uses them
    nccl.py       processes that NCCL misses in a running job
    reach.py      which hosts can connect to which
    pairs.py      pairs of hosts with a slow network
    as_text.py    a report as text
    as_html.py    a report as HTML
    report.py     all findings, the rows worth showing, and both as plain data
    profile.py    where running ranks spend their time, and which rank they wait for
"""
