"""`python -m distmagic` is the program `distmagic`."""

import sys

from distmagic.cli import main

sys.exit(main())
