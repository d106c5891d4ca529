"""What is kept on a host: directories, journals, logs, the list of jobs."""
