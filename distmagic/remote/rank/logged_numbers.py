"""Reports numbers as metrics that the user's code logs by a library instead of `report`.

    tqdm            set_postfix(loss=...), set_postfix_str("loss=0.3"), and
                    set_description("epoch 1: loss 0.3")
    transformers    logs of a Trainer, every `logging_steps`
    lightning       self.log("loss", loss), every `log_every_n_steps`
    accelerate      accelerator.log({"loss": ...})

A rank may use several of these at once: for example, Lightning's bar shows what it logs. Only the
best source counts, in the order `report`, frameworks, bars, printed lines. The agent reads printed
lines: `remote/wire/printed_numbers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from distmagic.remote.rank.outbox import NumberSource
from distmagic.remote.rank.report import report_logged
from distmagic.remote.training import import_hooks
from distmagic.remote.wire.printed_numbers import numbers_of

# Frameworks that log the numbers in their bars themselves.
_FRAMEWORKS = (
    "lightning.",
    "pytorch_lightning.",
)
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"


def install() -> None:
    """Read numbers from these libraries in this process, once they are imported."""
    import_hooks.when_imported("tqdm", _follow_tqdm)
    import_hooks.when_imported(
        "transformers.trainer_callback",
        lambda module: _before(module.CallbackHandler, "on_log", _on_log),
    )
    import_hooks.when_imported(
        "accelerate.accelerator",
        lambda module: _before(module.Accelerator, "log", _log_of_accelerate),
    )
    for package in ("lightning.pytorch", "pytorch_lightning"):
        import_hooks.when_imported(
            f"{package}.{_CONNECTOR}",
            lambda module: _before(module._LoggerConnector, "log_metrics", _log_metrics),  # noqa: SLF001
        )  # fmt: skip


def _before(kind: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of a method before each call of it."""

    def method(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    import_hooks.wrap(kind, name, method)


# ---- for each followed method, a function with the same arguments


def _follow_tqdm(module: ModuleType) -> None:
    _before(module.tqdm, "set_postfix", _set_postfix)
    for name in ("set_postfix_str", "set_description", "set_description_str"):
        _before(module.tqdm, name, _set_text)


def _set_postfix(
    bar: Any, /, ordered_dict: Any = None, refresh: object = None, **values: object
) -> None:
    del refresh
    _log_of_bar(bar, {**dict(ordered_dict or {}), **values})


def _set_text(
    bar: Any, text: object = "", refresh: object = None, *, s: object = "", desc: object = "",
) -> None:  # fmt: skip
    del refresh
    _log_of_bar(bar, numbers_of(str(text or s or desc)))


def _log_of_bar(bar: Any, values: Mapping[str, object]) -> None:
    """Report the numbers of a visible bar at its count, unless its framework logs them."""
    was_shown = hasattr(bar, "unit")  # tqdm sets nothing for a disabled bar
    if was_shown and not type(bar).__module__.startswith(_FRAMEWORKS):
        # During an iteration over a bar, its own count lags like its display.
        count = max(bar.n, (bar.initial or 0) + bar.distmagic_at)
        report_logged(values, NumberSource.BAR, step=count)


def _on_log(
    handler: object, args: object, state: Any, control: object, logs: Any = None
) -> None:
    del handler, args, control
    report_logged(logs or {}, NumberSource.FRAMEWORK, step=state.global_step)


def _log_of_accelerate(
    accelerator: object, values: Mapping[str, object], step: Any = None, *_: object,
    **__: object,
) -> None:  # fmt: skip
    del accelerator
    report_logged(values, NumberSource.FRAMEWORK, step=step)


def _log_metrics(
    connector: Any, metrics: Mapping[str, object], step: Any = None
) -> None:
    if step is None:
        step = metrics.get("step", connector.trainer.global_step)
    report_logged(metrics, NumberSource.FRAMEWORK, step=step)
