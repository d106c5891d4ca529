"""Shows a picture of this rank in the notebook."""

from __future__ import annotations

import io
from typing import Any

from distmagic.remote.rank import report

_MOST_BYTES = 120_000  # in base64 it is one packet to the agent
_SCALES = (1.0, 0.7, 0.5, 0.3)


def show(figure: object) -> None:
    """Show a picture in the run's view and in the saved notebook: a figure of matplotlib, an image of PIL, bytes of a PNG.

    The last pictures of a run are kept. It does nothing outside a run and never raises: what is no picture, or too large,
    is left out with one line on stderr; of many at once the first ones are shown.
    """
    if not report.is_in_run():
        return
    try:
        png = figure if isinstance(figure, bytes) else _png(figure)
    except Exception as error:  # noqa: BLE001  # whatever it is, the training goes on
        report.complain("show", f"a {type(figure).__name__} is no picture ({error})")
        return
    if len(png) > _MOST_BYTES:
        report.complain("show", f"a picture of {len(png):,} bytes is too large")
    else:
        report.post_picture(png)


def _png(figure: Any) -> bytes:
    """Return a picture as PNG, smaller where it would be too large."""
    into = io.BytesIO()
    for scale in _SCALES:
        into = io.BytesIO()
        if hasattr(figure, "savefig"):
            figure.savefig(into, format="png", dpi=100 * scale)
        else:
            size = [max(1, int(side * scale)) for side in figure.size]
            figure.resize(size).save(into, "PNG")
        if into.tell() <= _MOST_BYTES:
            break
    return into.getvalue()
