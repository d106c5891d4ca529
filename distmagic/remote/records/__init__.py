"""What distmagic stores on a host: directories, journals, logs, the list of jobs, working
directories.

These modules read and write files and look at processes; they start, end and send nothing. A full
disk ends no job: the writers record the error and continue.

Read in this order:
    places        the paths of all directories
    atomic_file   writes a file so that it appears complete or not at all
    logs          a log file with a size limit: keeps its beginning and its newest part
    journal       every event of one node, numbered, on disk before it is sent
    listing       lists the jobs that have files or processes on this host
    owners        the notebooks that share a folder
    manifest      the list of the files that a run sends
    found_files   finds and reads files that ranks wrote
    work_sync     puts files into a working directory
    work_dirs     the working directories of runs, and the jobs that use them; states and promises
    environments  virtual environments that were made for notebooks
    expiry        removes old files
"""
