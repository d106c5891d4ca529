"""What Linux says about this host and its processes: small readers of /proc, cgroups, sockets, systemd and NVML.

Here: functions that ask the system and return values, each usable alone. Never here: nothing of a job's state, no thread
but those that others ask for, and no file is written. `processes` also signals processes and sets two of this process's own attributes. Read in any
order:

    processes.py    find, wait for and end processes
    awake.py        a rank answers whether its main thread runs Python
    asking.py       a process says when and where it waits for somebody to type
    exit_codes.py   an exit code in words
    memory.py       whether the kernel killed a process for want of memory
    hardware.py     how busy the host and its GPUs are
    facts.py        what a plan needs to know of a host
    device_claims.py  which job has a device, and which jobs wait for it
    customization.py  what Python runs at its start because of PYTHONPATH
    logout.py       whether processes survive log-out
    socket_peer.py  the user at the other end of a unix socket
    torchrun_variables.py  the variables that torchrun gives to ranks
    threads.py      begins all threads of this process, and names who ends each of them
    gc_pause.py     spares the garbage collector objects that stay: loaded modules
"""
