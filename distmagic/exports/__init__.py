"""What all exports share: a job, its program, and a folder that starts it without a notebook and
without distmagic.

How data flows. Every step except the last is pure: a frozen `Job` goes in, files come out.

    the cell, or a script  --session/exporting-->  the program's files, and a Job
    Job                    --systems/*/export-->   File, File, ...: the system's own files, and a
                                                   short README
    Files                  --folder.write-->       a folder, in which only files of an earlier
                                                   export are replaced

Every node runs plain torchrun (planning/torchrun.py has its flags) on a plain script. If possible,
a cell becomes a program as a person would write it. Otherwise the script runs the pickled call,
which needs the same Python version and the zip next to it. Only quoting.py quotes the user's
values. Secrets go where the system keeps secrets.

An export contacts no host and submits no job, and its files do not depend on time or chance. Read
in this order:

    job.py           what is exported: program, resources, variables                    pure
    quoting.py       quotes a value for a shell, for YAML or for a Dockerfile           pure
    cell_script.py   a cell as a program                                                pure
    parts.py         lines that several systems share: variables, torchrun's command    pure
    systems.py       makes the whole folder of a job for the given system               pure
    on_nodes/        scripts that are copied into the folder unchanged
    folder.py        writes the files
"""
