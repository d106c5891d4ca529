"""Chooses the screen for the environment of this process."""

from __future__ import annotations

import os
import shutil
import sys

from distmagic.render.screen import AnnouncingScreen
from distmagic.screens.log import LogScreen, QuietScreen
from distmagic.screens.notebook import NotebookScreen
from distmagic.screens.steady import SteadyScreen
from distmagic.screens.terminal import TerminalScreen


def screen_for(
    shell: object = None, *, in_background: bool = False
) -> AnnouncingScreen:
    """Return the screen for this environment: `shell` is IPython's, None outside of it or if unknown.

    A background run prints nothing during the run: its lines would appear in some other cell.
    """
    ipython = sys.modules.get("IPython")
    if shell is None and ipython is not None:
        shell = ipython.get_ipython()
    # By name, so that Jupyter is not imported; includes shells of derived kernels.
    ancestors = [kind.__name__ for kind in type(shell).__mro__]
    if "ZMQInteractiveShell" in ancestors:
        return SteadyScreen(NotebookScreen(in_background=in_background))
    if in_background:
        return SteadyScreen(QuietScreen())
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        has_colours = "NO_COLOR" not in os.environ
        return SteadyScreen(
            TerminalScreen(sys.stdout, shutil.get_terminal_size, colours=has_colours)
        )
    return SteadyScreen(LogScreen(sys.stdout))
