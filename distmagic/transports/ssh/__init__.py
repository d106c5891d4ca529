"""The SSH transport through paramiko: one connection a host, one channel a process.

All configuration is OpenSSH's own: ~/.ssh/config, known_hosts and the agent count as they do for `ssh`. It is paramiko
because its calls block, as a transport's do: no event loop beside the notebook's. It is imported in client.py alone,
and its exceptions become ours there. Nothing here starts a program on this machine but a ProxyCommand and `Match exec`.
Read the modules in this order:

    config_lines.py   the lines of a configuration, with Include and Match
    config.py         what the configuration says of one host
    known_hosts.py    whether a host's key is known, revoked or another one
    pins.py           keys that are trusted when they are first seen, and kept
    deadline.py       the time that is left of a connection's limit
    streams.py        what SSH runs over: a socket, a ProxyCommand, a channel of a jump host
    public_keys.py    public halves of keys, and certificates, in files
    agent.py          the user's ssh agent: its keys, its signatures
    client.py         paramiko's client, and its exceptions
    auth.py           which ways of logging in are tried, in which order
    process.py        a process on the host, over a channel
    ssh.py            connects and logs in, through jump hosts that several hosts share
"""
