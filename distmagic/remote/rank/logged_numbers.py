"""Numbers that the user's code logs in another way than by `report` become metrics of the rank.

    tqdm            set_postfix(loss=...), set_postfix_str("loss=0.3"), and set_description("epoch 1: loss 0.3")
    transformers    what a Trainer logs, every `logging_steps`
    lightning       self.log("loss", loss), every `log_every_n_steps`
    accelerate      accelerator.log({"loss": ...})

A rank may have several of these at once: Lightning shows in its bar what it logs. The first of the list report,
frameworks, bars, printed lines that says anything is listened to, and those behind it are not any more. Printed lines
are the agent's: `remote/wire/printed_numbers.py`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from distmagic.remote.rank.bars import ID
from distmagic.remote.rank.outbox import NumberSource
from distmagic.remote.rank.report import report_logged
from distmagic.remote.training import import_hooks
from distmagic.remote.wire import printed_numbers

# Log themselves what their bars show.
_FRAMEWORKS = (
    "lightning.",
    "pytorch_lightning.",
)
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
_AT = "_distmagic_at"  # attribute of a bar: the number of its present item, from 1 on
_NAMED_NUMBER = re.compile(
    r"([A-Za-z_][\w/.@-]*)\s*[=:]\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf)"
    r"(?![\w.%/])"
)


def install() -> None:
    """Have numbers taken from these libraries in this process, wherever they are imported."""
    import_hooks.when_imported("tqdm", _follow_tqdm)
    import_hooks.when_imported("transformers.trainer_callback", _follow_transformers)
    import_hooks.when_imported("accelerate.accelerator", _follow_accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        import_hooks.when_imported(f"{package}.{_CONNECTOR}", _follow_lightning)


def numbers_in(text: str) -> dict[str, str]:
    """Return the numbers of a text such as "loss=0.3, lr: 1e-4", by name."""
    return dict(_NAMED_NUMBER.findall(text))


def _before(kind: Any, name: str, act: Callable[..., None]) -> None:
    """Have `act` called with the arguments of a method before each call of it."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        act(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(kind, name, method)


# ---- one function for each library, with the arguments of the method that it follows


def _follow_tqdm(module: ModuleType) -> None:
    tqdm: Any = module.tqdm
    original = tqdm.__iter__
    setattr(tqdm, _AT, 0)

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        for index, item in enumerate(original(self), 1):
            setattr(self, _AT, index)
            yield item

    tqdm.__iter__ = __iter__
    axes: dict[tuple[str, ...], _Axis] = {}

    def log(bar: Any, values: Mapping[str, object]) -> None:
        if values and _counts(bar):
            axis = axes.setdefault(tuple(values), _Axis())
            report_logged(values, NumberSource.BAR, step=axis.step(bar))

    def set_postfix(
        bar: Any, ordered_dict: Any = None, refresh: object = None, **values: object
    ) -> None:
        del refresh
        log(bar, {**dict(ordered_dict or {}), **values})

    def set_postfix_str(bar: Any, s: object = "", refresh: object = None) -> None:
        del refresh
        log(bar, numbers_in(str(s)))

    def set_description(bar: Any, desc: object = None, refresh: object = None) -> None:
        del refresh
        log(bar, printed_numbers.numbers_of(str(desc)))

    _before(tqdm, "set_postfix", set_postfix)
    _before(tqdm, "set_postfix_str", set_postfix_str)
    _before(tqdm, "set_description", set_description)
    _before(tqdm, "set_description_str", set_description)


class _Axis:
    """Where numbers of the same names stand: at the count of their bar, added to those of all bars before it."""

    def __init__(self) -> None:
        self._bar = 0
        self._before = self._last = 0.0
        self._has_moved = False

    def step(self, bar: Any) -> float | None:
        """Return where numbers of this bar stand now; None while the bar has not moved: they may come oftener than it counts.

        While a bar is iterated over, its own count is as old as what it shows.
        """
        number = getattr(bar, ID)
        count = float(max(bar.n, (bar.initial or 0) + getattr(bar, _AT)))
        if number != self._bar:
            self._bar, self._has_moved = number, False
            self._before += self._last
        elif count != self._last:
            self._has_moved = True
        elif not self._has_moved:
            return None
        self._last = count
        return self._before + count


def _counts(bar: Any) -> bool:
    """Whether the numbers of a bar are taken: it has been shown, and no framework logs them."""
    was_shown = hasattr(bar, "unit")  # tqdm sets nothing for one that is switched off
    return was_shown and not type(bar).__module__.startswith(_FRAMEWORKS)


def _follow_transformers(module: ModuleType) -> None:
    def on_log(
        handler: object, args: object, state: Any, control: object, logs: Any = None
    ) -> None:
        del handler, args, control
        report_logged(logs or {}, NumberSource.FRAMEWORK, step=state.global_step)

    _before(module.CallbackHandler, "on_log", on_log)


def _follow_accelerate(module: ModuleType) -> None:
    def log(
        accelerator: object, values: Mapping[str, object], step: Any = None, *_: object,
        **__: object,
    ) -> None:  # fmt: skip
        del accelerator
        report_logged(values, NumberSource.FRAMEWORK, step=step)

    _before(module.Accelerator, "log", log)


def _follow_lightning(module: ModuleType) -> None:
    def log_metrics(
        connector: Any, metrics: Mapping[str, object], step: Any = None
    ) -> None:
        if step is None:
            step = metrics.get("step", connector.trainer.global_step)
        report_logged(metrics, NumberSource.FRAMEWORK, step=step)

    _before(module._LoggerConnector, "log_metrics", log_metrics)  # noqa: SLF001
