"""The words before the Python of a host: a shell that sets up its environment, and a program such as a container's. Pure."""

from __future__ import annotations

import shlex

from distmagic.errors import SpecError

ENVIRONMENT = (
    "env:"  # before the name or the folder of a virtual environment, in place of a path
)
# Where `%distributed env sync`, conda, virtualenvwrapper, venv and uv make environments; a name may also be a folder, or
# a project's.
_PLACES = (
    "$1",
    "$HOME/$1",
    "$1/.venv",
    "$HOME/$1/.venv",
    "${DISTMAGIC_HOME:-$HOME/.distmagic}/envs/$1",
    "$HOME/.virtualenvs/$1",
    "$HOME/.venvs/$1",
    "$HOME/.conda/envs/$1",
    "$HOME/miniconda3/envs/$1",
    "$HOME/miniforge3/envs/$1",
    "$HOME/mambaforge/envs/$1",
    "$HOME/anaconda3/envs/$1",
    "/opt/conda/envs/$1",
)
# The exit code of a shell whose setup failed: no Python and no shell has it by itself.
SETUP_FAILED = 97


def interpreter_words(python: str) -> tuple[str, ...]:
    """Return the words that start an interpreter; behind `env:` stands an environment, which the host looks for.

    The variables are those that activating it would set.
    """
    if not python.startswith(ENVIRONMENT):
        return (python,)
    name = python.removeprefix(ENVIRONMENT).removeprefix("~/").rstrip("/")
    places = " ".join(f'"{place}"' for place in _PLACES)
    found = (
        'PATH="$e/bin:$PATH"; export PATH; '
        'if [ -d "$e/conda-meta" ]; then CONDA_PREFIX="$e"; export CONDA_PREFIX; '
        'else VIRTUAL_ENV="$e"; export VIRTUAL_ENV; fi; '
        'shift; exec "$e/bin/python" "$@"'
    )
    code = (
        f'for e in {places}; do if [ -x "$e/bin/python" ]; then {found}; fi; done; '
        f"echo no environment of this name in {places} >&2; exit 127"
    )
    return ("sh", "-c", code, "sh", name)


def words_before_python(setup: str, exec_prefix: str) -> tuple[str, ...]:
    """Return what stands before the Python on its command line.

    `setup` is bash. What it writes goes to stderr, so that nothing is mistaken for the program's own output.
    Raises `SpecError` for a prefix that can't be split into words.
    """
    try:
        prefix = tuple(shlex.split(exec_prefix))
    except ValueError as error:
        raise SpecError(
            f"--exec-prefix can't be split into words: {str(error).lower()}.",
            f"It is: {exec_prefix}",
        ) from None
    if not setup.strip():
        return prefix
    # One line, because a log-in shell such as csh is given no other: $'...' has its line breaks as \\n.
    script = setup.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    code = f"{{ eval $'{script}'; }} </dev/null >&2 || exit {SETUP_FAILED}; "
    return ("bash", "-c", code + 'exec "$@"', "bash", *prefix)
