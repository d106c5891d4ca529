"""Reads from Linux about this host and its processes: /proc, cgroups, sockets, systemd and NVML.

Each function reads from the system and returns a value, and can be used alone. None holds state of
a job, writes a file, or starts a thread that its caller did not ask for. `processes` also signals
processes and sets two attributes of its own process. Read in any order:

    processes.py    find, wait for and end processes
    awake.py        whether the main thread of a rank runs Python code
    asking.py       reports when and where a process waits for input
    exit_codes.py   explains exit codes
    memory.py       whether the kernel killed a process because memory was short
    hardware.py     the load of the host and its GPUs
    facts.py        the facts about a host that a plan needs
    device_claims.py  the job that has a device, and the jobs that wait for it
    customization.py  code that Python runs at its start because of PYTHONPATH
    logout.py       whether processes survive log-out
    socket_peer.py  the user at the other end of a unix socket
    torchrun_variables.py  the variables that torchrun sets for ranks
    threads.py      starts all threads of this process, and lists how each of them ends
    gc_pause.py     excludes loaded modules from garbage collection
"""
