"""Turns a call into files that are sent to the hosts.

Files are content-addressed: equal calls give equal files, and a file that is on a host already is
not sent again. This package only writes files on the notebook machine; runner/delivery.py sends
them. Read the modules in this order:

    blobs.py           content-addressed files on this machine
    bundle.py          the part of distmagic that runs on hosts, as one zip
    ignored.py         rules of .gitignore and .distmagicignore: files that are not sent
    folder.py          chooses the files of a folder that are sent
    local_modules.py   finds the user's own modules, which hosts don't have
    on_ranks.py        faults of a program that are visible in its text before it runs
    refused.py         values that must not be sent although they can be pickled
    pack.py            turns a call, its code and its large values into a `Payload`
    pack_errors.py     why a call can't travel, as errors that name the variable
    program.py         the same for a script with its arguments
    tree.py            turns files into blobs, and a list of them
    work_files.py      all files that a run sends: a folder, and local modules
    sizes.py           sizes in words
"""
