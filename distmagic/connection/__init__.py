"""Opens links to hosts, and keeps them idle between runs; what is asked over a link is in requests/.

A `Link` is a conversation with one `contact` process on a host, over a process that a transport started there. Nothing
here decides what a run does next, and no module here knows of more than one job. Every wrong byte of a host becomes a
`ProtocolError`, every end of file a `ConnectionLost`, and each names the host. In this order:

    link.py           one link: requests and answers, a job's events, bytes of files
    opening.py        opens one: starts Python on the host, sends the bundle, takes the facts
    limits.py         keeps whatever hosts send within the bounds of its fields
    connections.py    the kernel's open connections, one for each host; the only place that connects
    idle_links.py     links that no run uses; they renew what hosts keep loaded
    lease_keeper.py   renews the lease of a job over the links to its hosts
    parallel.py       the same act on all hosts at the same time, and one error for all
    warm_hosts.py     what hosts keep loaded for this kernel, from the first link of a run on
    link_opener.py    hosts with the way to them, and the one way to a link with each
    first_links.py    the first link to each host of a run, opened in the background
    certificate.py    a certificate by which hosts of one delivery, or nodes of one job, know each other
    prompts.py        questions to the user, asked by threads and answered on the main thread
"""
