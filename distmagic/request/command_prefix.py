"""The command line before Python on a host: a shell that sets up the environment, and a program
like `docker exec`.

A setup runs once on a host, and the resulting variables are stored on the host. Its text is never
on a command line, which every user of the host can read: it is the first line of standard input.
Pure.

    notebook: lines for a shell that replaces Python, setup line, then the program's input
    host:     runs the setup, unless its variables are stored; then the program
"""

from __future__ import annotations

import hashlib
import shlex

from distmagic.errors import UsageError

# prefix of the name or folder of a virtual environment, instead of a path
ENVIRONMENT = "env:"
# Folders in which `%distributed env sync`, conda, virtualenvwrapper, venv and uv make environments;
# a name may also be a folder, or a project's.
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
# The start of a host's error message, followed by the folders.
NO_ENVIRONMENT = "no environment of this name in"
# The exit code of a shell whose setup failed: neither Python nor a shell uses it.
SETUP_FAILED = 97
SETUP_LIMIT_S = 300  # time limit of a setup
_KEPT_MIN = 720  # minutes for which the variables of a setup are reused
# Runs the setup, read from descriptor 8, and writes the changed exported variables and functions to
# the named file, in one write, so that a full disk is noticed. One line without single quotes,
# because the next line puts it between two. Its own variables start with _dm_, because the user may
# use any other name.
_CHANGES = (
    "_dm_t=$(cat <&8); exec 8<&-; declare -A _dm_was; for _dm_n in $(compgen -e); do _dm_was[$_dm_n]=${!_dm_n}; done; "
    'eval "$_dm_t" || exit; umask 077; set +euf; unset IFS; '
    "_dm_o=$(for _dm_n in $(compgen -e); do case $_dm_n in _|_dm_*|SHLVL|PWD|OLDPWD) continue;; esac; "
    '[ "${_dm_was[$_dm_n]+x}${_dm_was[$_dm_n]}" = "x${!_dm_n}" ] || printf "export %s=%q\\n" "$_dm_n" "${!_dm_n}"; done; '
    'for _dm_n in "${!_dm_was[@]}"; do [ "${!_dm_n+x}" ] || echo "unset $_dm_n"; done; '
    'declare -Fx | while read -r _ _ _dm_n; do declare -f "$_dm_n"; echo "export -f $_dm_n"; done); echo "$_dm_o" >"$1"'
)
# $1 is the digest of the setup, the other words are the program. Hosts may share a home, so a file
# belongs to one host, until its next boot. Of two simultaneous connections the second waits, if the
# host has flock. If the home can't store a file of this size, the setup's result is used without
# being stored.
_KEPT_SETUP = (
    '_dm_u=$(umask); umask 077; _dm_d="${DISTMAGIC_HOME:-$HOME/.distmagic}/setup"; '
    "read -r _dm_b </proc/sys/kernel/random/boot_id; "
    '_dm_f="$_dm_d/$1-$HOSTNAME-${_dm_b%%-*}"; shift; '
    'while IFS= read -r _dm_l; do case $_dm_l in echo*) ;; *) break;; esac; done; eval "_dm_t=$_dm_l"; '
    '{ mkdir -p "$_dm_d" && exec 9>>"$_dm_d/.lock"; } 2>/dev/null && flock 9 2>/dev/null; '
    f'if [ -z "$(find "$_dm_f" -size +0 -mmin -{_KEPT_MIN} 2>/dev/null)" ]; then _dm_w="$_dm_f.$$"; '
    '{ head -c 99999 /dev/zero >"$_dm_w" && : >"$_dm_w"; } 2>/dev/null || { rm -f "$_dm_w"; _dm_w=$(mktemp); }; '
    f'timeout -k 5 {SETUP_LIMIT_S} bash -c \'{_CHANGES}\' bash "$_dm_w" 8<<<"$_dm_t" 9>&- </dev/null >&2 '
    f'&& [ -s "$_dm_w" ] || {{ _dm_r=$?; rm -f "$_dm_w"; [ $_dm_r = 124 ] && echo "it took longer than {SETUP_LIMIT_S} s" >&2; exit {SETUP_FAILED}; }}; '
    f'if [ "$_dm_w" = "$_dm_f.$$" ]; then mv "$_dm_w" "$_dm_f" || exit {SETUP_FAILED}; else _dm_f=$_dm_w; fi; fi; '
    f'exec 9>&-; umask "$_dm_u"; [ -s "$_dm_f" ] || exit {SETUP_FAILED}; . "$_dm_f"; '
    '[ "$_dm_f" != "$_dm_w" ] || rm -f "$_dm_w"; exec "$@"'
)


def interpreter_words(python: str) -> tuple[str, ...]:
    """Return the words that start an interpreter; after `env:` follows an environment, which the
    host looks up.

    They also set the variables that activating it would set.
    """
    if not python.startswith(ENVIRONMENT):
        return (python,)
    name = python.removeprefix(ENVIRONMENT).removeprefix("~/").rstrip("/")
    places = " ".join(f'"{place}"' for place in _PLACES)
    # The link with the name may change while this Python still imports: use its current target.
    found = (
        'if [ -L "$_dm_e" ] && [ -f "$_dm_e/ready" ]; then _dm_e=$(CDPATH= cd -P -- "$_dm_e" && pwd -P) || continue; fi; '
        'PATH="$_dm_e/bin:$PATH"; export PATH; '
        'if [ -d "$_dm_e/conda-meta" ]; then CONDA_PREFIX="$_dm_e"; export CONDA_PREFIX; '
        'else VIRTUAL_ENV="$_dm_e"; export VIRTUAL_ENV; fi; '
        'shift; exec "$_dm_e/bin/python" "$@"'
    )
    code = (
        f'for _dm_e in {places}; do if [ -x "$_dm_e/bin/python" ]; then {found}; fi; done; '
        f"echo {NO_ENVIRONMENT} {places} >&2; exit 127"
    )
    return ("sh", "-c", code, "sh", name)


def words_before_python(setup: str, exec_prefix: str) -> tuple[str, ...]:
    """Return the words in front of Python on a host's command line.

    `setup` is bash code; `setup_line` must be written to the program's standard input first. Its
    output goes to stderr, so that it is not mistaken for the program's. Raises `UsageError` for a
    prefix that can't be split into words.
    """
    try:
        prefix = tuple(shlex.split(exec_prefix))
    except ValueError as error:
        raise UsageError(
            f"--exec-prefix can't be split into words: {str(error).lower()}.",
            f"It is: {exec_prefix}",
        ) from None
    if not setup.strip():
        return prefix
    digest = hashlib.sha256(setup.encode()).hexdigest()[:16]
    return ("bash", "-c", _KEPT_SETUP, "bash", digest, *prefix)


def setup_line(setup: str) -> bytes:
    """Return the line that sends a setup to the host, b"" for none."""
    if not setup.strip():
        return b""
    # $'...' has its line breaks as \\n.
    text = setup.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{text}'\n".encode()
