"""Requests to one host over a link: each function sends one request, or a few, and returns the
host's answer.

A function takes the link, blocks until the answer comes, and keeps no state. It opens no link
itself, except by a function that its caller passes. Answers are not trusted: their size is limited,
and paths of files are checked. Read in this order:

    host_requests.py  a host's addresses, free ports, jobs, blobs and working directories
    blob_requests.py  files of a payload
    job_requests.py   one job: its end, logs, files, stacks, small results, a new node
    profile_requests.py  a profile of all ranks of a job, merged into one trace
    log_order.py      merges stdout and stderr of a rank into one text
    file_requests.py  files of the user
    remote_files.py   a folder of the user on a host: lists, downloads and uploads it
    progress_line.py  one line on stderr with the progress of a transfer
"""
