"""What is kept on a host: directories, journals, logs, the list of jobs, working directories.

Only files are written and read here, and processes are only looked at: nothing is started, ended or sent. A disk that is
full ends no job: its writers note the error and go on.

Read in this order:
    places        where everything lies
    atomic_file   a file that appears whole or not at all
    logs          a file that grows within a limit: its beginning and its newest part are kept
    journal       every event of one node, numbered, on disk before it is sent
    listing       the jobs of which this host has something
    owners        for whom a folder is kept that several may use
    manifest      the list of the files that a run brings
    found_files   files that ranks left there, found and read
    work_sync     how files come into a working directory
    work_dirs     the working directories of runs, and which jobs use them; their states and promises
    environments  virtual environments that were made for notebooks
    expiry        what is removed, and when
"""
