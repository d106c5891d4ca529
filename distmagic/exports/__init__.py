"""What all exports share: a job, its program, and a folder that starts it without a notebook and without distmagic.

The way of the data. Everything but the last step is pure: a frozen `Job` comes in, files go out.

    the cell, or a script    --session/exporting-->    the program's files, and a Job
    Job                      --systems/*/export-->    File, File, ...: a system's own files, and a README of five lines
    Files                    --folder.write-->         a folder, in which only what an export wrote is replaced

Every node starts plain torchrun (its flags come from planning/torchrun.py) on a plain script. A cell becomes a program as
a person would have written it where its text allows that; else the script makes the pickled call, which needs the same
Python and the zip beside it. A value of the user is quoted in quoting.py and nowhere else. Secrets go to the place that
a system has for them.

Nothing here reaches a host or submits a job, and no value depends on a clock or on chance. In this order:

    job.py           what is exported: program, resources, variables                       pure
    quoting.py       a value as a word of a shell, a text of YAML or of a Dockerfile  pure
    cell_script.py   a cell as a program                                                   pure
    parts.py         lines that several systems share: variables, torchrun's command       pure
    systems.py       the whole folder of a job, by the system that was asked for           pure
    on_nodes/        scripts that travel in the folder as they are
    folder.py        writes the files
"""
