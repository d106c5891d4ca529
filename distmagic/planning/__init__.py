"""Makes the plan of a run: from the facts of the hosts, what each of them starts.

Everything here is pure: the facts of hosts come in, a plan or an error goes out. Nothing here speaks to a host. Read the
modules in this order:

    preflight.py        what stands in the way of a job, before anything is started
    devices.py          devices that other jobs have, and what is said of it
    torchrun.py         torchrun's flags, and how torchrun numbers ranks
    plan.py             the plan: what every host starts
    start_messages.py   the plan as messages to the agents
    jobs.py             the jobs of all hosts, as their listings tell them
"""
