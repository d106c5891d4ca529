"""The SSH transport through paramiko: one connection a host, one channel a process.

All configuration is OpenSSH's: ~/.ssh/config, known_hosts and the ssh agent work as for `ssh`. The
library is paramiko because its calls block, as a transport's do, so it needs no second event loop
next to the notebook's. Only client.py imports it, and converts its exceptions to distmagic's. The
only programs started on this machine are a ProxyCommand and `Match exec`. Read the modules in this
order:

    config_lines.py   reads the lines of a configuration, with Include and Match
    config.py         the configuration of one host
    known_hosts.py    whether a host's key is known, revoked or different
    pins.py           keys that are trusted on first use, and stored
    deadline.py       the remaining time of a connection's limit
    streams.py        the stream under SSH: a socket, a ProxyCommand, a channel of a jump host
    public_keys.py    public halves of keys, and certificates, in files
    agent.py          the user's ssh agent: its keys, its signatures
    client.py         paramiko's client, and its exceptions
    auth.py           the authentication methods, and their order
    process.py        a process on the host, over a channel
    ssh.py            connects and logs in, through shared jump hosts
"""
