"""Changes the globals of the program that executes this file: first a file of settings, then --name=value."""
import sys
from ast import literal_eval

for arg in sys.argv[1:]:
    if "=" not in arg:
        print(f"settings of {arg}")
        exec(open(arg).read())
    else:
        name, value = arg.removeprefix("--").split("=")
        assert name in globals(), name
        try:
            value = literal_eval(value)
        except (SyntaxError, ValueError):
            pass
        globals()[name] = value
