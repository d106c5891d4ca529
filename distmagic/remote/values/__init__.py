"""Values in files: how a function travels to the ranks, and how what it returns travels back.

Tensors and arrays are written straight from their memory and mapped when they are loaded. Nothing here knows of hosts or
jobs. cloudpickle, torch and numpy are imported only where a value needs them.

Read in this order:
    parcel        one value in one file: `dump` and `load`
    pickling      the pickler and the unpickler, and what they do in their own way
    source_form   functions and classes for another Python: as source
    cell_objects  what a cell defines and pickle knows by name only
    decorated     what a decorator made and nobody can pickle, such as Triton's kernels
    by_name       what the notebook has by name and the call's code does not name
    storages      which bytes of which tensor travel
    side_files    large values in files of their own, which are not sent again while they stay the same
    unpicklable   which part of a value can't be pickled, in words
    left_out      what is kept of a result that can't be pickled whole
    captured      what a call has changed of the values that came with it
    settings      what the notebook has set in torch and logging, and ranks begin with
    reloading     modules that have changed on the notebook's disk are loaded again
    call          what the payload of a job holds, and how a rank runs it
"""
