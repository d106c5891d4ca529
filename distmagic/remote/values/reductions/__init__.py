"""How objects are pickled that pickle would refuse, or write wrongly: a module for each kind.

Each function returns what `__reduce__` would, and None for an object that is not its own. A module
also has the functions that the pickle calls when it is
loaded. No module writes a file, and none uses the pickler.

Read in any order:
    placeholders    functions that a pickle names, and that the loader of a parcel replaces
    python_objects  weak references, exceptions, and objects with a `__getattr__`
    torch_objects   hooks of tensors and optimizers, DataLoaders, wrapped and parametrized modules
    cell_objects    objects that a cell defines and that pickle can't write, or only by name
    classes         what cloudpickle leaves out of classes, and classes that stay as they are
    source_form     functions and classes as source, for another Python version
"""
