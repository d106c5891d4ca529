"""Throw-away SSH hosts on this machine, for learning and for tests.

Real SSH, real processes, one home for each host; all of it ends with the kernel. No real host is touched here, and no
other package imports this one but notebook/. The server is asyncssh's, though transports use paramiko: one process
serves all hosts, with the pipes of a command joined to its channel, which paramiko leaves to its user. In this order:

    playground.py  starts and ends the server's process; writes the OpenSSH configuration that leads to the hosts
    server.py      that process: an asyncssh server for each host, and the commands on it
"""
