"""Allocates nodes by Slurm's commands on a log-in node, and ends idle allocations; exports a job
for sbatch.

How data flows. Pure modules parse the request and Slurm's answers; the other modules run commands.

    the line's flags   --hosts.asked-->             SlurmRequest
    SlurmRequest       --submission-->              arguments and script for sbatch
    both of them       --allocation, by a Shell-->  a pending job
    squeue's rows      --job_states-->              JobState, and its description for the view
    a running job      --nodelist-->                names of nodes: Hosts of this allocation
    a node             --srun-->                    Transport, used by the same launcher as SSH

The batch script starts a keeper on every node (remote/keeper). The lead's keeper holds the lease of
the whole allocation, and the notebook renews it through one pipe. When that keeper ends, the script
and the Slurm job end too. So no allocation remains after its notebook has gone, even if the job was
still pending.

The package does not use runs, ranks or torch, and leaves no file on the log-in node. Read in this
order:

    nodelist.py      parses "a[1-3,07]" into names                                         pure
    submission.py    the arguments and the script for sbatch                               pure
    job_states.py    parses squeue: pending and why, running where, how it ended           pure
    shell.py         the log-in node: one connection, commands with a time limit, their errors
    lease_pipe.py    holds an allocation by a pipe to the keeper of its first node
    allocation.py    one allocation: pending, held by its lease, ended
    hosts.py         the allocations of a notebook, and their list
    srun_words.py    arguments of srun, and its error messages                             pure
    srun.py          transport: nodes of a job, each process a step of srun on a log-in node
    inside.py        the variables of a node of a job                                      pure
    export.py        two sbatch files: one task for each node, or one for each rank        pure
"""
