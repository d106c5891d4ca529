"""Finds metrics in printed lines, such as `step 100: train loss 2.31, lr 3e-4`.

Only unambiguous ones are accepted: a name whose last word is well known, then `:`, `=` or a space,
and a number. `PrintedRows` makes rows of metrics from them, if a rank reports none in another way.
"""

from __future__ import annotations

import re

from distmagic.remote.wire.parts import MetricRow

_MAX_CHARS = 400  # limit of a line; a longer one is no line about training
_MAX_NAME = 40
# Limit of a rank's output between two checks; only the end of more is used.
_KEPT_BYTES = 64 << 10
_LINES = 50  # lines of one check that are used, the last ones
_PATTERNS = 16  # kinds of lines in one stream

_KNOWN = frozenset(
    ("acc", "accuracy", "auc", "bleu", "bpb", "bpc", "entropy", "f1", "gnorm", "iou", "kl", "loss", "losses", "lr", "mae",
     "mfu", "miou", "mse", "nll", "norm", "perplexity", "ppl", "psnr", "return", "reward", "rmse", "ssim", "throughput", "top")
)  # fmt: skip
_TWO_WORDS = frozenset(("learning rate", "grad norm", "gradient norm"))
# Qualifying words: before a known name as separate words, or after it as its last part.
_WHICH = frozenset(
    ("average", "avg", "best", "dev", "eval", "final", "mean", "running", "smooth", "test", "total", "train", "training",
     "val", "valid", "validation")
)  # fmt: skip
_SPEED = re.compile(
    r"(?:tok|tokens?|samples?|seqs?|sequences?|ex|examples?|imgs?|images?|steps?|iters?|it)(?:/|_per_)s(?:ec|econd)?"
)
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_COUNT = r"\d{1,3}(?:,\d{3})+|\d+"
_WORD = r"(?!(?i:nan|inf)\b)[A-Za-z][\w@/.-]*"
_PAIR = re.compile(
    rf"(?<![\w/@.-])((?:{_WORD}[ _]){{0,2}}{_WORD})[\"']?(\s*[:=]\s*|\s+)(?:tensor\()?"
    rf"({_NUMBER}|nan|NaN|[-+]?inf)(?:\s?/\s?({_COUNT}))?(?![\w/]|[.:]\w|,\d|\s*[*+/^]\s*[\w(])"
)
_COUNTED = re.compile(
    r"(?<![\w/])(?:global[ _])?(?:step|iter|iteration|it|batch|update)s?[\"']?\s*[:=#]?\s*\[?\s*(\d+(?:,\d{3})*)(?![\w.%])",
    re.IGNORECASE,
)
_OUT_OF = re.compile(r"[\[(|]\s*(\d+)\s*/\s*\d+(?!.*[\[(|]\s*\d+\s*/)")  # the last one
_EPOCH = re.compile(r"(?<!\w)epoch[\"']?\s*[:=#]?\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


_HINT = re.compile(
    "|".join([*_KNOWN, *_TWO_WORDS, "/s", "_per_"]).replace(" ", "[ _]").encode(),
    re.IGNORECASE,
)


def may_have_numbers(text: bytes) -> bool:
    """Whether `numbers_of` may find any in a text: a quick test, which excludes most texts."""
    return _HINT.search(text) is not None


def numbers_of(line: str) -> dict[str, float]:
    """Return the numbers of a line by name, in lower case and without spaces; {} for nearly all
    lines.

    Drawn bars (`40%|####`) and very long lines have none.
    """
    if len(line) > _MAX_CHARS or "\r" in line.rstrip() or "%|" in line:
        return {}
    found: dict[str, float] = {}
    for words, between, value, total in _PAIR.findall(_COLOUR.sub("", line)):
        name = _name_of(words)
        if total:
            share = _share(value, total)
            if (
                any(part in ("acc", "accuracy") for part in re.split(r"[_/.@-]", name))
                and share is not None
            ):
                found.setdefault(name, share)
            continue
        # "loss 3 times", "return 0.5": an integer after a space, and a line of code, may mean
        # anything.
        is_clear = not between.isspace() or not (value.isdigit() or name == "return")
        if name and is_clear:
            found.setdefault(name, float(value.replace(",", "")))
    return found


def _share(value: str, total: str) -> float | None:
    """Return 0.982 for `9820` and `10000`, None if it is no fraction."""
    part, whole = (text.replace(",", "") for text in (value, total))
    if not part.isdigit() or not 0 < int(whole) < 1 << 53 or int(part) > int(whole):
        return None
    return int(part) / int(whole)


def step_of(line: str) -> float | None:
    """Return the step in a line; without one, the count in `30/100`, else the epoch, else None."""
    text = _COLOUR.sub("", line)
    for pattern in (_COUNTED, _OUT_OF, _EPOCH):
        if match := pattern.search(text):
            return float(match[1].replace(",", ""))
    return None


def _name_of(text: str) -> str:
    """Return the metric name in the words before a number, "" if it is not a known one."""
    *before, last = text.lower().split(" ")
    if before and f"{before[-1]} {last}" in _TWO_WORDS:
        last = f"{before.pop()}_{last}"
    elif not _is_known(last):
        return ""
    while before and before[-1] in _WHICH:
        last = f"{before.pop()}_{last}"
    return last[:_MAX_NAME]


def _is_known(name: str) -> bool:
    parts = [part.rstrip("0123456789") for part in re.split(r"[_/.@-]+", name)]
    while len(parts) > 1 and (len(parts[-1]) < 2 or parts[-1] in _WHICH):
        parts.pop()
    is_two = " ".join(parts[-2:]) in _TWO_WORDS
    known = parts[-1] in _KNOWN or name in _KNOWN
    return known or is_two or _SPEED.fullmatch(name) is not None


class PrintedRows:
    """The printed output of one stream of a rank, until rows are read from it.

    A line counts only after another one with the same names: what is printed once is no curve.
    """

    def __init__(self) -> None:
        self._text = b""
        # The first line of each kind, by its names; None once it is in the rows.
        self._firsts: dict[tuple[str, ...], tuple[str, MetricRow] | None] = {}

    def add(self, data: bytes) -> None:
        """Add output of the rank."""
        self._text += data
        if len(self._text) > _KEPT_BYTES:
            _, _, self._text = self._text[-_KEPT_BYTES:].partition(b"\n")

    def take(self, at_s: float) -> list[MetricRow]:
        """Return rows of metrics from the lines that were completed since the last call.

        `at_s` is the time that new rows get, in seconds since the rank's start.
        """
        text, _, self._text = self._text.rpartition(b"\n")
        if not may_have_numbers(text):
            return []
        rows = []
        for line in text.split(b"\n")[-_LINES:]:
            if len(line) <= 4 * _MAX_CHARS and may_have_numbers(line):
                rows += self._rows_of(line.decode(errors="replace"), at_s)
        return rows

    def _rows_of(self, line: str, at_s: float) -> list[MetricRow]:
        numbers = numbers_of(line)
        kind = tuple(numbers)
        if not numbers or (kind not in self._firsts and len(self._firsts) >= _PATTERNS):
            return []
        row = MetricRow(at_s=at_s, step=step_of(line), metrics=numbers)
        first = self._firsts.setdefault(kind, (line, row))
        if first is None:
            return [row]
        if first[0] == line:
            return []
        self._firsts[kind] = None
        return [first[1], row]
