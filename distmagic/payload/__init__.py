"""Turns a call into files that travel to the hosts.

The files are content-addressed: equal calls give equal files, and a host that has a file is not sent it again. Here
files are written on this machine only; sending them is runner/delivery.py's work. Read the modules in this order:

    blobs.py           content-addressed files on this machine
    bundle.py          the half of distmagic that runs on hosts, as one zip
    local_modules.py   finds the user's own modules, which hosts don't have
    on_ranks.py        what the text of a program shows before its ranks run it
    refused.py         what must not travel although it could be pickled
    pack.py            the call, its code and its large values become a `Payload`
    program.py         so does a script with its arguments
    ignored.py         what .gitignore and .distmagicignore keep here
    folder.py          which files of a folder travel
    tree.py            files become blobs, and a list of them
    work_files.py      all files that a run brings: a folder, and local modules
    sizes.py           sizes in words
"""
