"""Print what an executed notebook shows in the end: `python notebooks/summary.py build/00_quickstart.ipynb`.

The line with the test accuracy, the last table of distmagic above it (its text form), and where the notebook lies. Exit
code 1 says that one of these is missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(path: Path) -> int:
    """Print the summary of this notebook and return the exit code."""
    outputs = [
        output
        for cell in json.loads(path.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    lines = [accuracy_line([output]) for output in outputs]
    accuracy = next(filter(None, reversed(lines)), "")
    above = outputs[: lines.index(accuracy)] if accuracy else outputs
    table = last_table(above)
    print(table or "The notebook holds no final table of distmagic.")
    print(accuracy or "The notebook prints no line that starts with 'test accuracy'.")
    print(f"executed notebook: {path.resolve()}")
    return 0 if table and accuracy else 1


def last_table(outputs: list[dict]) -> str:
    """Return the text of the last table over ranks, "" without one. It is stored as text and as HTML side by side."""
    shown = [
        output["data"]
        for output in outputs
        if {"text/plain", "text/html"} <= set(output.get("data", {}))
    ]
    texts = ["".join(data["text/plain"]) for data in shown]
    return next((text for text in reversed(texts) if "rank" in text), "")


def accuracy_line(outputs: list[dict]) -> str:
    """Return the last printed line that starts with "test accuracy", "" without one."""
    printed = (
        "".join(output.get("text", ""))
        for output in outputs
        if output["output_type"] == "stream"
    )
    lines = [line for text in printed for line in text.splitlines()]
    return next(
        (line for line in reversed(lines) if line.lower().startswith("test accuracy")),
        "",
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
