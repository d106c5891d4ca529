"""Programs that each want a Python of their own, forked from one that has loaded what they import: loading takes longest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.waiting import HANG_S

# A child leaves the loop and ends as any Python does, with its exit handlers, its threads and its traceback.
_SERVER = """
import gc, json, os, signal, sys, types
exec(sys.argv[1])
gc.freeze()  # no collection looks at it again, at the end of a child neither
_answers = os.dup(1)
_requests = os.fdopen(os.dup(0), "rb")
for _line in _requests:
    _pid = os.fork()
    if _pid == 0:
        break
    _code = os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1])
    os.write(_answers, b"%d\\n" % _code)
else:
    os._exit(0)
_asked = json.loads(_line)
for _number, _path in enumerate((os.devnull, *_asked["outputs"])):
    _file = os.open(_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(_file, _number)
    os.close(_file)
os.close(_answers)
_requests.close()
signal.alarm(100)
os.environ.update(_asked["env"])
os.chdir(_asked["cwd"])
sys.argv = [_asked["script"], *_asked["arguments"]]
sys.path[0] = os.path.dirname(_asked["script"])
sys.modules["__main__"] = types.ModuleType("__main__")
sys.modules["__main__"].__file__ = _asked["script"]
with open(_asked["script"]) as _file:
    _text = _file.read()
exec(compile(_text, _asked["script"], "exec"), sys.modules["__main__"].__dict__)
"""


class Forks:
    """A Python that has run `loaded`, from which each script that `run` gets is forked."""

    def __init__(
        self, loaded: str, env: Mapping[str, str], flags: Sequence[str] = ()
    ) -> None:
        self._server = subprocess.Popen(
            [sys.executable, *flags, "-c", _SERVER, loaded], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env)
        )  # fmt: skip

    def run(
        self,
        script: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a script as the main module, with these variables beside those that the server has; kill it after 100 seconds."""
        outputs = [script.with_suffix(".out"), script.with_suffix(".err")]
        asked = {
            "script": str(script),
            "arguments": arguments,
            "outputs": [*map(str, outputs)],
            "env": dict(env or {}),
            "cwd": cwd,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked).encode() + b"\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        out, err = (path.read_bytes() for path in outputs)
        return subprocess.CompletedProcess([str(script)], code, out, err)

    def close(self) -> None:
        self._server.communicate(timeout=HANG_S)
