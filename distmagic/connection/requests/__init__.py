"""What one host is asked over a link: each function here is one request, or a few, and returns what the host answers.

A function takes the link, blocks until it has the answer, and keeps nothing. No link is opened here but by a function
that the caller gives, and no answer is trusted: what it can cost in memory is bounded, and a file's path is checked. In
this order:

    host_requests.py  addresses and ports of the host, and what it keeps: jobs, blobs, working directories
    blob_requests.py  files of a payload
    job_requests.py   one job: its end, logs, files, stacks, small results, a new node
    profile_requests.py  a profile of all ranks of a job, made one trace
    log_order.py      the two streams of a rank as one text
    file_requests.py  files of the user
    remote_files.py   a folder of the user on a host: listed, fetched to this machine, sent there
    progress_line.py  one line on stderr that says how far a transfer is
"""
