"""Programs that travel as one argument of `python3 -c`."""

import json
import sys

import pytest

from distmagic.transports import program_text
from tests.builders.shell import completed


@pytest.mark.parametrize("role", ["keeper", "usher", "hold"])
def test_modules_in_the_working_directory_are_not_pythons_own(role, tmp_path):
    """A batch script begins in the user's home, or wherever the job was submitted from."""
    for name in ("base64", "zlib", "json", "os", "signal", "types", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user's own')")
    python, *words = program_text.command(sys.executable, role, {})
    # Up to the program itself, and what it imports.
    text = words[2].replace("exec(", "print(*sys.path, sep='\\n');import json,signal,types,socket;(", 1)  # fmt: skip
    done = completed([python, *words[:2], text], cwd=tmp_path, check=False)  # fmt: skip
    assert (done.stderr, done.returncode) == ("", 0)
    assert str(tmp_path) not in done.stdout.splitlines()


def test_a_python_in_the_home_needs_no_shell_that_expands_its_name(tmp_path):
    """A step of srun is started without one; the keeper starts others by its own command line."""
    (tmp_path / "my env").mkdir()
    python = tmp_path / "my env/$python"
    python.symlink_to(sys.executable)
    command = program_text.command("~/my env/$python", "keeper", {"a": "b $c"})
    shown = (
        "import json;print(json.dumps(open('/proc/self/cmdline').read().split('\\0')))"
    )
    words = [shown if "base64" in word else word for word in command]
    done = completed(words, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    options = ["-u", "-c", shown, "distmagic-keeper"]
    assert json.loads(done.stdout) == [str(python), *options, '{"a": "b $c"}', ""]
