"""Answers the notebook on a host, over one SSH channel, and keeps torch loaded between runs.

A contact holds nothing: when its channel ends it ends, and agents go on under their lease. It starts agents and never
runs a rank. The template is a process of its own, from which agents are forked.

Read in this order:
    boot              the first program on a host: unpacks the bundle
    contact           one request after the other
    agents            starts agents, and follows those that run
    relay             bytes between notebook and agent, while a job is followed
    file_sender       files that are kept here, to the notebook: logs, results, blobs
    blob_receiver     files that come in, from the notebook or from another host
    file_exchange     files of the user, to the notebook and from it
    environment_sync  virtual environments, made by uv or pip
    blob_server       files that are handed on to the next host, over TLS
    mutual_tls        TLS between two ends that hold the same certificate
    sweep             ends what agents left that were killed
    template_client   finds, starts and ends templates
    template          a process that has torch loaded and forks agents
    task              where no notebook can open a channel: talks to a contact in its place, and writes to a log
"""
