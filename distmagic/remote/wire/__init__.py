"""The messages between notebook and hosts, and their encoding as lines of JSON.

Notebook and hosts use the same files, so they can't disagree. The modules open no connection and
read no file. Every received line is checked field by field before it becomes a message.

Read in this order:
    protocol   all names in one place, and the protocol's version: import messages from this module
    vocabulary the words of stop reasons and outcomes, as types
    bounds     types of fields, which limit how much a host may send in them
    parts      records used in messages; `JobTerms` has the settings of a job
    requests   what the notebook asks of a host
    answers    what a host replies
    events     what happens in a job, numbered
    cells      requests to ranks that stay alive, and their answers
    file_names names of files, which may not be valid text
    clipping   shortens texts so that they fit into a line
    printed_numbers  finds metrics in a line of printed text
    codec      encodes a message as a line, and decodes a line to a message or a `BadLine`
    lines      splits a stream into lines and blocks of bytes
    log_lines  messages as lines of a platform's log
"""
