"""Gets nodes from Slurm, on a log-in node, and keeps them until nobody needs them; and a job as a folder for sbatch.

The way of the data. What is asked for and what Slurm says are words, understood in pure modules; few lines act.

    the line's flags    --hosts.asked-->                     SlurmRequest
    SlurmRequest        --submission-->                      sbatch's arguments and script
    these               --allocation, by a Shell-->          a job, pending
    squeue's rows       --job_states-->                      JobState; in words for the view
    a running job       --nodelist-->                        names of nodes: Hosts of this allocation
    a node              --srun-->                            Transport, under the one launcher

The batch script starts a keeper on every node (remote/keeper). The lead's keeper holds the lease of the whole
allocation, which this notebook renews through one pipe; when that keeper ends, the script and the job end too. So a
notebook that is gone, also while the job was pending, leaves no allocation, and nobody has to tell Slurm.

Nothing here knows of runs, ranks or torch. No file is left on the log-in node. In this order:

    nodelist.py      "a[1-3,07]" as names                                                  pure
    submission.py    what sbatch is told                                                   pure
    job_states.py    what squeue says: pending and why, running where, how it ended        pure
    shell.py         the log-in node: one connection, commands with a time limit
    commands.py      look, cancel; what is raised where a command refuses
    lease_pipe.py    what holds an allocation: a pipe to the keeper of its first node
    allocation.py    one allocation: pending, held by its lease, ended
    hosts.py         what a notebook has of it: allocations, their list
    srun_words.py    what srun is told, and what it says when it fails                     pure
    srun.py          transport: nodes of a job, each process a step of srun on a log-in node
    inside.py        the variables of a node of a job                                      pure
    export.py        two forms: a task a node, a task a rank                               pure
"""
