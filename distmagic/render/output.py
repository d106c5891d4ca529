"""The last lines of ranks' output: chooses those to show, and converts them to HTML in the rank's
colour.

torchrun's own lines are only shown if nothing else explains a failure.
"""

from __future__ import annotations

import re
from html import escape

from distmagic.render import quantities as q
from distmagic.render.curves import palette
from distmagic.render.text_width import plain, spans
from distmagic.state.builder import output_line
from distmagic.state.model import OutputLine, RunState

_LINES = 100
_MAX_CHARS = 1000  # of one line
_MAX_BYTES = 60_000  # of all of them
_MAX_OPEN = 8
_PATIENCE_S = 10.0  # after this time torchrun's output may explain a slow start
# As drawn by tqdm; it writes them to stderr, and they are no warnings.
_BAR = re.compile(r"\d+%\|.*\| *[\d.]+\w*/[\d.]+\w* \[")


# ---- which lines are shown


def shown_lines(state: RunState) -> tuple[OutputLine, ...]:
    """Return the last lines of output that are worth showing."""
    if torchrun_matters(state):
        return state.lines
    return tuple(line for line in state.lines if line.rank >= 0)


def is_shown(state: RunState, line: OutputLine) -> bool:
    """Whether the view shows this line: one of a rank, or torchrun's if it explains the run."""
    return line.rank >= 0 or torchrun_matters(state)


def count_of_lines(state: RunState) -> int:
    """Return the number of lines, without the hidden ones that are still in memory."""
    hidden = len(state.lines) - len(shown_lines(state))
    return state.lines_seen - hidden


def torchrun_matters(state: RunState) -> bool:
    """Whether torchrun's lines are the only explanation.

    torchrun also prints warnings in successful runs, and whenever distmagic stops the ranks. All
    its output is in run.logs(-1).
    """
    if state.is_over:
        return state.phase == "failed" and state.first_failure is None
    return not state.workers and state.at_s > _PATIENCE_S


# ---- as HTML


def about_output(state: RunState) -> str:
    """Return the line above the output: how much of it is shown, and where the rest is."""
    shown = min(_LINES, len(shown_lines(state)))
    seen = count_of_lines(state)
    some = f"last {shown} of {seen:,} lines" if seen > shown else "output"
    where = f"{state.variable}.logs(rank), %distributed logs {plain(state.job)} RANK"
    return f'<div class="dm-about dm-faint">{some} · all: {escape(where)}</div>'


def output_lines(state: RunState) -> str:
    """Return the last lines, and the unfinished ones, in a `<pre>`; "" for none."""
    # From the last line upward, so that the oldest lines are left out.
    upward = [log_line(line, " dm-open") for line in _open(state)]
    upward += map(log_line, reversed(shown_lines(state)[-_LINES:]))
    kept = []
    room = _MAX_BYTES
    for text in upward:
        room -= len(text.encode())
        if room < 0:
            break
        kept.append(text)
    kept.reverse()
    return f"<pre>{''.join(kept)}</pre>" if kept else ""


def open_lines(state: RunState) -> str:
    """Return the HTML of incomplete lines."""
    return "".join(log_line(line, " dm-open") for line in reversed(_open(state)))


def _open(state: RunState) -> list[OutputLine]:
    """Return the incomplete lines, last one first."""
    found = []
    last_first = sorted(state.open_lines.items(), reverse=True)
    for (rank, node_rank, stream), text in last_first[-_MAX_OPEN:]:
        line = output_line(rank, state.nodes[node_rank].host, stream, text)
        if line.text.strip() and is_shown(state, line):
            found.append(line)
    return found


def log_line(line: OutputLine, more_class: str = "") -> str:
    """Return the HTML of one line."""
    is_warning = line.stream == "stderr" and not _BAR.search(line.text)
    stream = "dm-stderr" if is_warning else "dm-stdout"
    name = escape(plain(line.label[:120]))
    label = f'<b class="{palette(line.rank)}">[{name}]</b>'
    text = spans(line.text[:_MAX_CHARS])
    left_out = len(line.text) - _MAX_CHARS
    if left_out > 0:
        text += f"… ({q.plural(left_out, 'more character')})"
    return f'<span class="dm-line {stream}{more_class}">{label} {text}\n</span>'


def pictures(state: RunState) -> str:
    """Return the pictures that ranks showed, "" for none."""
    figures = []
    for picture in state.pictures:
        words = f"rank {picture.rank} {plain(picture.host)}"
        if picture.step is not None:
            words += f", step {q.count(picture.step)}"
        label = escape(words)
        image = (
            f'<img src="data:image/png;base64,{picture.png}" alt="picture of {label}">'
        )
        figures.append(
            f'<figure class="dm-picture">{image}<figcaption>{label}</figcaption></figure>'
        )
    return f'<div class="dm-pictures">{"".join(figures)}</div>' if figures else ""
