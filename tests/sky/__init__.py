"""`make sky`: SkyPilot's own program launches clusters on the lab's Slurm, its only cloud, and all of ours runs on them.

    packages.py   makes build/sky: SkyPilot and what its nodes install, from the extra `sky` of pyproject.toml
    lab.py        the lab's Slurm as SkyPilot wants it, and a user of it with a home of his own
    scenes.py     exported tasks in both forms; a notebook whose cells say `--on sky`
    __main__.py   runs the scenes, and says what each step took

It is no part of `make test`: it takes some minutes, and needs half a gigabyte of packages, Python 3.10 and rsync.
"""
