"""Numbers that the user's code logs in another way than by `report` become metrics of the rank.

    tqdm            set_postfix(loss=...) and set_postfix_str("loss=0.3")
    transformers    what a Trainer logs, every `logging_steps`
    lightning       self.log("loss", loss), every `log_every_n_steps`
    accelerate      accelerator.log({"loss": ...})

A rank may have several of these at once: Lightning shows in its bar what it logs. The first of the list report,
frameworks, bars that says anything is listened to, and those behind it are not any more.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from distmagic.remote.rank import import_hooks
from distmagic.remote.rank.outbox import NumberSource
from distmagic.remote.rank.report import report_logged

# Log themselves what their bars show.
_FRAMEWORKS = (
    "lightning.",
    "pytorch_lightning.",
)
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
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
    def set_postfix(
        bar: Any, ordered_dict: Any = None, refresh: object = None, **values: object
    ) -> None:
        del refresh
        if _counts(bar):
            report_logged({**dict(ordered_dict or {}), **values}, NumberSource.BAR)

    def set_postfix_str(bar: Any, s: object = "", refresh: object = None) -> None:
        del refresh
        if _counts(bar):
            report_logged(numbers_in(str(s)), NumberSource.BAR)

    _before(module.tqdm, "set_postfix", set_postfix)
    _before(module.tqdm, "set_postfix_str", set_postfix_str)


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
