"""Opens links to hosts, and keeps them open between runs.

The requests that are sent over a link are in requests/.

A `Link` is a conversation with one `contact` process on a host. A transport has started that
process. Links take no decisions about a run, and each module handles one job at most. Malformed
data from a host raises `ProtocolError`, and end of file raises `ConnectionLost`; both name the
host. Read in this order:

    link.py           one link: requests and answers, a job's events, bytes of files
    opening.py        opens a link: starts Python, sends the bundle, receives facts about the host
    limits.py         enforces size limits on everything that hosts send
    connections.py    the kernel's connections, one for each host; the only module that connects
    idle_links.py     open links that no run uses; they renew the lease of warm processes
    lease_keeper.py   renews the lease of a job over the links to its hosts
    parallel.py       does the same on all hosts at once, and joins their errors into one
    warm_hosts.py     the warm processes on hosts, from the first link of a run on
    link_opener.py    the hosts of a run and how to reach them; opens a link to each
    first_links.py    the first link to each host of a run, opened in the background
    certificate.py    a certificate shared by hosts that send each other files, or by nodes of a job
    prompts.py        questions to the user, asked by threads and answered on the main thread
"""
