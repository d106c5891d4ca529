"""What is wrong with hosts, and between them: the doctor's judgement.

Everything here is pure: what hosts have answered goes in, findings, a table, text and HTML come out. No host is asked and
nothing is changed here (session/doctor.py asks, and a cure is a command that the user may paste). In this order:

    finding.py    a finding, and a host as it was found
    of_host.py    what is wrong with one host by itself
    among.py      in what hosts differ that should be alike
    gpus.py       what is wrong with GPUs, and with the torch that is to use them
    reach.py      who can dial whom
    pairs.py      which hosts are slow together
    as_text.py    a report as text
    as_html.py    a report as HTML
    report.py     all findings, the rows that are worth a look, and both as data
    profile.py    where the time of running ranks goes, and for whom they wait
"""
