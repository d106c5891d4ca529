"""Copies settings of libraries, logging and Python from the notebook's process to each rank.

Imports no library.

read        --JSON, and a text for the user-->   payload
begin_with  --in a rank, before the call-->      the same settings
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

VARIABLE = "DISTMAGIC_SETTINGS"  # of a rank, until it starts
# For a library: its name, how to read the setting, how to set it, and its value in a new process.
_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_OF: dict[str, tuple[Any, ...]] = {
    "torch": (
        ("default dtype", lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
         lambda torch, value: torch.set_default_dtype(getattr(torch, value)), "float32"),
        ("matmul precision", methodcaller("get_float32_matmul_precision"),
         lambda torch, value: torch.set_float32_matmul_precision(value), "highest"),
        ("deterministic mode", methodcaller("get_deterministic_debug_mode"),
         lambda torch, value: torch.set_deterministic_debug_mode(value), 0),
        ("anomaly detection", methodcaller("is_anomaly_enabled"),
         lambda torch, value: torch.autograd.set_detect_anomaly(value), False),
        ("cudnn.deterministic", attrgetter("backends.cudnn.deterministic"),
         lambda torch, value: setattr(torch.backends.cudnn, "deterministic", value), False),
        ("cudnn.benchmark", attrgetter("backends.cudnn.benchmark"),
         lambda torch, value: setattr(torch.backends.cudnn, "benchmark", value), False),
    ),
    "numpy": (("seterr", methodcaller("geterr"), lambda numpy, value: numpy.seterr(**value), _ERRORS),),
    "decimal": (
        ("decimal precision", lambda decimal: decimal.getcontext().prec,
         lambda decimal, value: setattr(decimal.getcontext(), "prec", value), 28),
    ),
}  # fmt: skip
# Texts that show that a notebook creates one of them.
MADE = re.compile(
    r"(set_default_dtype|set_float32_matmul_precision|set_deterministic_debug_mode|use_deterministic_algorithms"
    r"|set_detect_anomaly|seterr|getcontext\(\)\.prec|cudnn\.deterministic|cudnn\.benchmark|cuda\.matmul\.allow_tf32|basicConfig"
    r"|(getLogger\(\)|calls \w+)\.(setLevel|addHandler)) in"
)
_USUAL_LIMITS = (1_000, 3_000)  # of Python, and of jedi, which provides completion
_STREAMS = ("stdout", "stderr")


def read() -> tuple[str, str]:
    """Return the settings that differ from a new process, as text for `begin_with` and in words;
    both "" for none.
    """
    found: dict[str, Any] = {}
    words = []
    for library, rows in _OF.items():
        module = sys.modules.get(library)
        for name, get, _, usual in rows if module else ():
            try:
                value = get(module)
            except (AttributeError, RuntimeError):
                continue  # a torch without it, or with contradicting settings
            if value != usual:
                found.setdefault(library, {})[name] = value
                text = f"{name} {value}".replace("True", "on").replace("False", "off")
                words.append(text)
    limit = sys.getrecursionlimit()
    if limit not in _USUAL_LIMITS:
        found["recursion limit"] = limit
        words.append(f"recursion limit {limit:,}")
    loggers, levels = _loggers()
    if loggers:
        found["logging"] = loggers
        words.append(f"logging ({', '.join(levels)})")
    return (json.dumps(found) if found else ""), "; ".join(words)


def _loggers() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return level and handlers by name, for the root logger ("") and loggers in `__main__`, and
    the same in words; only set values.
    """
    values = list(vars(sys.modules["__main__"]).values())
    loggers = {one.name: one for one in values if isinstance(one, logging.Logger)}
    loggers.pop("root", None)
    found, words = {}, []
    for name, logger in {**loggers, "": logging.root}.items():
        handlers = []
        text = f"{name or 'the root logger'} at {logging.getLevelName(logger.level)}"
        for handler in logger.handlers:
            if row := _handler(handler):
                handlers.append(row)
            else:
                text += f", without its {type(handler).__name__}"
        usual = logging.NOTSET if name else logging.WARNING
        if handlers or logger.level != usual or not logger.propagate:
            words.append(text)
            found[name] = {
                "level": logger.level,
                "handlers": handlers,
                "propagate": logger.propagate,
            }
    return found, words


def _handler(handler: logging.Handler) -> dict[str, Any] | None:
    """Return the data to recreate a handler of stdout or stderr; None for any other one."""
    stream = str(getattr(getattr(handler, "stream", None), "name", "")).strip("<>")
    if type(handler) is not logging.StreamHandler or stream not in _STREAMS:
        return None
    made: dict[str, Any] = {"stream": stream, "level": handler.level, "format": None}
    formatter = handler.formatter
    if type(formatter) is logging.Formatter:
        mark = {logging.StrFormatStyle: "{", logging.StringTemplateStyle: "$"}
        style = mark.get(type(formatter._style), "%")  # noqa: SLF001
        made["format"] = [formatter._fmt, formatter.datefmt, style]  # noqa: SLF001
    return made


def begin_with(text: str, when_imported: Callable[..., None]) -> None:
    """Apply the settings of `read` in this process; those of a library once it is imported."""
    found = json.loads(text)
    if "recursion limit" in found:
        sys.setrecursionlimit(found["recursion limit"])
    for library in _OF:
        if library in found:
            when_imported(library, partial(_set, library, found[library]))
    ours = []
    for name, one in found.get("logging", {}).items():
        logger = logging.getLogger(name)
        logger.setLevel(one["level"])
        logger.propagate = one["propagate"]
        # A module of the call may have added its own.
        for made in one["handlers"] if not logger.handlers else ():
            handler = logging.StreamHandler(getattr(sys, made["stream"]))
            handler.setLevel(made["level"])
            if made["format"] is not None:
                handler.setFormatter(logging.Formatter(*made["format"]))
            logger.addHandler(handler)
            ours.append(handler)
    basic_config = logging.basicConfig

    def replacing(**options: Any) -> None:
        """Configure the root logger as in a new process: `basicConfig` does nothing if handlers
        exist.
        """
        logging.basicConfig = basic_config
        for handler in ours:
            logging.root.removeHandler(handler)
        basic_config(**options)

    logging.basicConfig = replacing


def _set(library: str, values: dict[str, Any], module: Any) -> None:
    for name, _, put, _ in _OF[library]:
        if name in values:
            with contextlib.suppress(AttributeError, RuntimeError):  # as above
                put(module, values[name])
