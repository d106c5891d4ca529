"""Throw-away SSH hosts on this machine, for learning and for tests.

They have real SSH, real processes and one home each, and end with the kernel, unless they are kept.
The playground touches no real host, and only notebook/ imports it. Its server uses asyncssh,
although transports use paramiko: one process serves all hosts, and asyncssh connects a command's
pipes to its channel. Read in this order:

    playground.py  starts and ends the server's process; writes an SSH configuration for the hosts
    server.py      the server's process: an asyncssh server for each host, and the commands on it
"""
