"""Throw-away SSH hosts on this machine, for learning and for tests.

Real SSH, real processes, one home for each host; all of it ends with the kernel. No real host is touched here, and no
other package imports this one but notebook/. In this order:

    playground.py  starts and ends the server's process; writes the OpenSSH configuration that leads to the hosts
    server.py      that process: an asyncssh server for each host
    command.py     one command on a host
"""
