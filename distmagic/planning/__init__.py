"""Makes the plan of a run: what each host starts, from facts about the hosts.

All modules are pure: facts about the hosts go in, a plan or an error comes out. No host is
contacted. Read the modules in this order:

    preflight.py        checks the hosts before anything is started
    devices.py          the devices that other jobs use, and the messages about them
    torchrun.py         torchrun's flags, and how torchrun numbers ranks
    plan.py             the plan: what every host starts
    start_messages.py   the plan as messages to the agents
    jobs.py             merges the lists of jobs that hosts send
"""
