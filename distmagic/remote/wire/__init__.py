"""What notebook and hosts send each other: messages, and the lines of JSON that carry them.

Both halves use these files, so that they can't disagree. Nothing here opens a connection, reads a file or decides
anything. Every line that arrives is checked field by field before anybody sees a message.

Read in this order:
    protocol   all names in one place, and the protocol's number: everybody imports messages from here
    vocabulary the words of stop reasons and outcomes, as types
    bounds     types of fields, which say how much a host may send in them
    parts      records that messages are made of; `JobTerms` is what a job runs on
    requests   what the notebook asks of a host
    answers    what a host replies
    events     what happens in a job, numbered
    cells      what is asked of ranks that stay, and what they answer
    file_names names of files, whose bytes need be no text
    clipping   texts of any length, made to fit into a line
    printed_numbers  numbers of a training in a line of text
    codec      how a message becomes a line, and a line a message or a `BadLine`
    lines      lines and blocks of bytes out of a stream
    log_lines  messages as lines of a platform's log
"""
