"""The first program on a host: sent as text to stdin, it runs on any Python, and requests the
bundle if the host lacks it.

    notebook: FIRST lines           host: PYTHON
    notebook: PROGRAM line          host: MARK + {"python", "have", "error"}
    notebook: size, bundle bytes    host: continues as `contact`, from the bundle
"""

from __future__ import annotations

import base64
import functools
import zlib

MARK = b"distmagic-boot "
PYTHON = b"distmagic-python"
# Output of a log-in shell whose start-up files have replaced Python by another shell, which reads
# these lines. If such files read some lines of input, they read these.
SHELL = b"distmagic-shell"
FIRST = b"echo distmagic-shell; exit\n" * 3
# A host never notices that its connection died before the program came: this Python ends by itself
# after this time.
SILENCE_S = 60
# The first words remove the working directory from the path, so that a json.py in the user's home
# does not replace Python's own.
BOOTSTRAP = (
    f"import sys;sys.path[:]=[p for p in sys.path if p];import signal;signal.alarm({SILENCE_S});"
    'print("distmagic-python");f=getattr(sys.stdin,"buffer",sys.stdin);'
    'exec(next((l for l in iter(f.readline,b"")if l[:5]!=b"echo "),""))'
)

# Runs on Pythons that are too old for the rest, so that the notebook can report that.
_PROGRAM = r"""
import hashlib, json, os, signal, stat, sys
def distmagic_others(gid):
    if not gid:
        return ""  # root's own group
    try:
        import grp, pwd
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except (ImportError, KeyError):
        return ""  # no names, as in containers
    # A group does not list those whose primary group it is, and a network's directory takes minutes or doesn't tell.
    try:
        with open("/etc/passwd", "rb") as file:
            entries = [line.decode("latin-1").split(":") for line in file if line.count(b":") > 2]
    except (IOError, OSError):
        entries = []
    me = str(user.pw_uid)
    others = set(group.gr_mem) - set([user.pw_name, "root"])
    others.update(each[0] for each in entries if each[3] == str(gid) and each[2] not in ("0", me))
    if others:
        return "%s (of group %d)" % (sorted(others)[0], gid)
    is_known_here = gid == user.pw_gid and me in [each[2] for each in entries]
    return "" if group.gr_name == user.pw_name or is_known_here else "whoever is of group %d" % gid
def distmagic_trust(home):
    for path in sorted(set([home, os.path.realpath(home)])):
        at = ""
        for name in path.strip("/").split("/"):
            above = os.stat(at or "/")
            if above.st_mode & 0o1002 == 0o002:
                raise OSError("everybody can replace what is in %s" % (at or "/"))
            if above.st_mode & 0o1020 == 0o020 and distmagic_others(above.st_gid):
                raise OSError("%s can replace what is in %s" % (distmagic_others(above.st_gid), at or "/"))
            at += "/" + name
            if not os.path.lexists(at):
                break
            link = os.lstat(at)
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid(), 65534):  # the last: root, of outside
                raise OSError("%s is another user's link (uid %d)" % (at, link.st_uid))
def distmagic_shut(home, folders):
    distmagic_trust(home)  # once more: others may have made it a moment ago
    for path in [home] + folders:
        found = os.stat(path)
        if found.st_uid != os.geteuid():
            raise OSError("%s belongs to another user (uid %d)" % (path, found.st_uid))
        shut = found.st_mode & (0o022 if path == home else 0o077)
        if shut:
            os.chmod(path, stat.S_IMODE(found.st_mode) & ~shut)
def distmagic_boot(sha):
    umask = os.umask(0o077)
    home = os.path.expanduser(os.environ.get("DISTMAGIC_HOME") or "~/.distmagic")
    is_nowhere = home.startswith("~")  # Python leaves it as it is; a directory of that name invites `rm -rf ~`
    home = home if is_nowhere else os.path.abspath(home)
    folder = os.path.join(home, "blobs")
    path = os.path.join(folder, sha)
    own = hashlib.sha256(os.urandom(16)).hexdigest()[:12]  # another host may share this home
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            ours = about.st_uid == os.geteuid() and not about.st_mode & 0o022  # nobody else can change it later
            have = ours and hashlib.sha256(file.read()).hexdigest() == sha  # the loss of power may have cut it short
    except (IOError, OSError):
        have = False
    reply = {"python": list(sys.version_info[:3]), "home": home, "have": have, "error": "",
             "executable": sys.executable, "system": sys.platform}
    try:
        if is_nowhere:
            raise OSError("HOME is not set, and this user has no entry in the password file")
        folders = [folder, os.path.join(home, "jobs")]
        distmagic_trust(home)
        for each in [home] + folders:
            try:
                os.makedirs(each, 0o700)
            except OSError:
                if not os.path.isdir(each) and not have:  # else it was there, or another host made it a moment ago
                    raise
        distmagic_shut(home, [each for each in folders if os.path.isdir(each)])
        # With the bundle there a full or read-only disk stands in nobody's way yet: jobs can be followed and stopped.
        if not have:
            trial = os.path.join(folder, "trial-" + own)
            try:
                with open(trial, "wb") as file:
                    file.write(b"x" * 4096)
            finally:
                if os.path.exists(trial):
                    os.remove(trial)
    except (IOError, OSError) as error:
        reply["error"] = str(error)
    os.write(1, b"\n@MARK@" + json.dumps(reply).encode() + b"\n")
    word = b""
    while not word.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            sys.exit(0)
        word += more
    size = int(word)
    if size:
        data = b""
        while len(data) < size:
            signal.alarm(@SILENCE_S@)
            more = os.read(0, min(1 << 20, size - len(data)))
            if not more:
                sys.exit(0)
            data += more
        if hashlib.sha256(data).hexdigest() != sha:
            sys.exit("distmagic: the bundle arrived damaged")
        aside = path + "." + own
        try:
            with open(aside, "wb") as file:
                file.write(data)
            os.rename(aside, path)
        except (IOError, OSError) as error:
            if os.path.exists(aside):
                os.remove(aside)
            refused = {"t": "refused", "n": 0, "what": "offer_blobs", "error": "can't write to %s: %s" % (home, error)}
            os.write(1, json.dumps(refused).encode() + b"\n")
            sys.exit(1)
    sys.path.insert(0, path)
    sys.argv = [path, "contact"]
    signal.alarm(0)
    from distmagic.remote.contact import contact
    os.umask(umask)
    contact.main([])
distmagic_boot("@SHA@")
""".replace("@SILENCE_S@", str(SILENCE_S))


@functools.cache
def program(sha256: str) -> bytes:
    """Return the line to send to `BOOTSTRAP`, for a bundle with this SHA-256."""
    source = _PROGRAM.replace("@MARK@", MARK.decode()).replace("@SHA@", sha256)
    packed = base64.b64encode(zlib.compress(source.encode(), 9)).decode()
    return f"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))\n".encode()
