"""The last lines that ranks wrote, as HTML: labelled in the rank's colour, stderr told apart, bounded."""

from __future__ import annotations

from html import escape

from distmagic.render.curves import palette
from distmagic.render.shown import count_of_lines, is_shown, shown_lines
from distmagic.render.text_width import plain, spans
from distmagic.state.model import OutputLine, RunState

OUTPUT_LINES = 100
_MAX_CHARS = 1000  # of one line
_MAX_BYTES = 60_000  # of all of them
_MAX_OPEN = 8


def about_output(state: RunState, lines: int = OUTPUT_LINES) -> str:
    """Return the line above the output: how much of it is shown, and where the rest is."""
    shown, seen = min(lines, len(shown_lines(state))), count_of_lines(state)
    some = f"last {shown} of {seen:,} lines" if seen > shown else "output"
    return f'<div class="dm-about dm-faint">{some} · all of a rank\'s: run.logs(rank)</div>'


def output_lines(state: RunState, lines: int = OUTPUT_LINES) -> str:
    """Return the last `lines` lines, and the unfinished ones, in a `<pre>`; "" for none."""
    done: list[str] = []
    room = _MAX_BYTES
    whole = shown_lines(state)[-lines:] if lines > 0 else ()
    for line, end in [*((line, " dm-open") for line in _open(state)), *((line, "") for line in reversed(whole))]:
        text = _line(line, end)
        room -= len(text.encode())
        if room < 0:
            break
        done.append(text)
    return f"<pre>{''.join(reversed(done))}</pre>" if done else ""


def _open(state: RunState) -> list[OutputLine]:
    """Return the lines that are not finished yet, the last one first."""
    found = []
    for (rank, node_rank, stream), text in sorted(state.open_lines.items(), reverse=True)[-_MAX_OPEN:]:
        host = state.nodes[node_rank].host
        label = f"rank {rank} {host}" if rank >= 0 else f"torchrun {host}"
        found.append(OutputLine(rank=rank, label=label, stream=stream, text=text.rpartition("\r")[2]))
    return [line for line in found if line.text.strip() and is_shown(state, line)]


def _line(line: OutputLine, more_class: str) -> str:
    text = line.text
    more = "" if len(text) <= _MAX_CHARS else f"… ({len(text) - _MAX_CHARS:,} more characters)"
    stream = "dm-stderr" if line.stream == "stderr" else "dm-stdout"
    label = f'<b class="{palette(line.rank)}">[{escape(plain(line.label[:120]))}]</b>'
    return f'<span class="dm-line {stream}{more_class}">{label} {spans(text[:_MAX_CHARS])}{more}\n</span>'
