"""The list of the files that a run sends to its hosts: one blob of compressed JSON.

The files' contents are sent in packs. A pack is a blob with the bytes of several files, in the
order of the list. A large file is a pack of its own, so that it can be sent without a copy. Names
that are not UTF-8 are encoded with lone surrogates.
"""

from __future__ import annotations

import json
import zlib

from distmagic.remote.frozen import frozen

LARGE_BYTES = 1 << 20  # a file of at least this size is a pack of its own
_MOST_BYTES = 256 << 20  # size limit of a list: that is a million files


@frozen
class ListedFile:
    """One file: `path` is relative to the working directory; `pack` is the index of the pack with
    its bytes.
    """

    path: str
    pack: int
    offset: int
    size_bytes: int
    is_executable: bool

    @property
    def end(self) -> int:
        """The offset behind its bytes."""
        return self.offset + self.size_bytes


@frozen
class Manifest:
    """All files of a run."""

    packs: tuple[str, ...] = ()  # SHA-256 of each pack
    files: tuple[ListedFile, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # (path, target)
    folders: tuple[str, ...] = ()  # the empty folders
    # paths below which files of earlier runs are removed if they are no longer listed; "" is the
    # whole working directory
    owned: tuple[str, ...] = ()

    def owns(self, path: str) -> bool:
        """Whether a path is one of `owned` or below it."""
        return any(
            not place or path == place or path.startswith(f"{place}/")
            for place in self.owned
        )


def encode(manifest: Manifest) -> bytes:
    """Return the blob of a manifest: equal files give equal bytes."""
    rows = [
        [file.path, file.pack, file.size_bytes, int(file.is_executable)]
        for file in manifest.files
    ]
    found = {
        "packs": manifest.packs,
        "files": rows,
        "links": manifest.links,
        "folders": manifest.folders,
        "owned": manifest.owned,
    }
    return zlib.compress(json.dumps(found, separators=(",", ":")).encode(), 6)


def decode(data: bytes) -> Manifest:
    """Return the manifest in a blob.

    Raises ValueError for invalid data, and for a path outside of the folder.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _MOST_BYTES)
        found = json.loads(text)
        files = []
        ends = [0] * len(found["packs"])
        for path, pack, size, is_executable in found["files"]:
            files.append(
                ListedFile(
                    path=checked(path),
                    pack=pack,
                    offset=ends[pack],
                    size_bytes=size,
                    is_executable=bool(is_executable),
                )
            )
            ends[pack] += size
        return Manifest(
            packs=tuple(found["packs"]),
            files=tuple(files),
            links=tuple((checked(path), target) for path, target in found["links"]),
            folders=tuple(checked(path) for path in found["folders"]),
            owned=tuple(found["owned"]),
        )
    except (zlib.error, LookupError, TypeError) as error:
        raise ValueError(f"the list of files can't be read: {error!r}") from None


def is_inside(path: str) -> bool:
    """Whether a path with slashes stays below the folder that it is relative to."""
    return "\0" not in path and not {"", ".", ".."} & set(path.split("/"))


def checked(path: str) -> str:
    """Return a path with slashes.

    Raises ValueError unless it stays below the folder that it is relative to.
    """
    if not is_inside(path):
        raise ValueError(
            f"{path[:200]!r} is refused: a path in the folder does not begin with /, and has no part .. or ., no empty "
            "part and no zero byte"
        )
    return path
