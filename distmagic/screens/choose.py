"""Chooses the screen for the environment of this process."""

from __future__ import annotations

import os
import shutil
import sys

from distmagic.outcome import shown
from distmagic.render.screen import Screen
from distmagic.screens.log import LogScreen, QuietScreen
from distmagic.screens.notebook import NotebookScreen
from distmagic.screens.steady import SteadyScreen
from distmagic.screens.terminal import TerminalScreen


def screen_for(shell: object = None, *, in_background: bool = False) -> Screen:
    """Return the screen for this environment: `shell` is IPython's, None outside of it or if
    unknown.

    A background run prints nothing during the run: its lines would appear in some other cell.
    """
    # By name, so that Jupyter is not imported; includes shells of derived kernels.
    ancestors = [kind.__name__ for kind in type(shell or shown.shell()).__mro__]
    screen: Screen
    if "ZMQInteractiveShell" in ancestors:
        screen = NotebookScreen(in_background=in_background)
    elif in_background:
        screen = QuietScreen()
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        has_colours = "NO_COLOR" not in os.environ
        size = shutil.get_terminal_size
        screen = TerminalScreen(sys.stdout, size, colours=has_colours)
    else:
        screen = LogScreen(sys.stdout)
    return SteadyScreen(screen)
