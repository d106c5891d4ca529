"""Values in files: sends a function to the ranks, and its return value back.

Tensors and arrays are written directly from memory, and memory-mapped when they are loaded. The
modules do not use hosts or jobs. They import cloudpickle, torch and numpy only if a value needs
them.

Read in this order:
    parcel        one value in one file: `dump` and `load`
    seen          notes about a parcel: the code in it, the modules that it needs
    pickling      the pickler, and how it differs from cloudpickle's; reductions/ has its kinds of
                  objects
    unpickling    the unpickler
    by_name       names of the notebook that a call uses without naming them in its code
    storages      the bytes of tensors that are sent
    side_files    large values in separate files, which are sent again only if they change
    unpicklable   names the part of a value that can't be pickled
    left_out      keeps the picklable part of a result
    captured      warns if a call has changed values that were sent with it
    settings      copies the notebook's settings of torch and logging to ranks
    reloading     reloads modules that have changed on the notebook's disk
    call          the contents of a job's payload, and how a rank runs it
"""
