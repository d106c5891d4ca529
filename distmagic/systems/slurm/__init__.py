"""Gets nodes from Slurm, on a log-in node, and keeps them until they are unused; exports a job as a folder for sbatch.

How data flows. Pure modules parse the request and Slurm's answers; few lines act.

    the line's flags    --hosts.asked-->                     SlurmRequest
    SlurmRequest        --submission-->                      sbatch's arguments and script
    these               --allocation, by a Shell-->          a job, pending
    squeue's rows       --job_states-->                      JobState; in words for the view
    a running job       --nodelist-->                        names of nodes: Hosts of this allocation
    a node              --srun-->                            Transport, used by the same launcher as SSH

The batch script starts a keeper on every node (remote/keeper). The lead's keeper holds the lease of the whole
allocation, and the notebook renews it through one pipe. When that keeper ends, the script and the Slurm job end too. So
no allocation remains after its notebook has gone, even if the job was still pending.

The package does not use runs, ranks or torch, and leaves no file on the log-in node. Read in this order:

    nodelist.py      parses "a[1-3,07]" into names                                         pure
    submission.py    the arguments and the script for sbatch                               pure
    job_states.py    parses squeue: pending and why, running where, how it ended           pure
    shell.py         the log-in node: one connection, commands with a time limit
    commands.py      queries and cancels jobs; errors of refused commands
    lease_pipe.py    holds an allocation by a pipe to the keeper of its first node
    allocation.py    one allocation: pending, held by its lease, ended
    hosts.py         the allocations of a notebook, and their list
    srun_words.py    arguments of srun, and its error messages                             pure
    srun.py          transport: nodes of a job, each process a step of srun on a log-in node
    inside.py        the variables of a node of a job                                      pure
    export.py        two forms: a task a node, a task a rank                               pure
"""
