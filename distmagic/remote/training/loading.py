"""Adds up how long a rank loads models: `torch.load`, `from_pretrained` of transformers, and files
of safetensors.

A function that is called by another one of these counts as part of it, and only the thread that
began counts.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from types import ModuleType
from typing import Any

from distmagic.remote.training import import_hooks

# Less is not worth a word, and neither is a small part of the function's time.
_WORTH_S = 3.0
_WORTH_SHARE = 0.5


class Loading:
    """The sum of one rank, from `begin` on."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._is_loading = False
        self.begin()
        # The package has the function too, if it was imported before.
        import_hooks.when_imported(
            "torch.serialization",
            lambda module: import_hooks.wrap(
                module, "load", self._timed, sys.modules.get("torch")
            ),
        )
        import_hooks.when_imported(
            "safetensors.torch",
            lambda module: import_hooks.wrap(module, "load_file", self._timed),
        )
        import_hooks.when_imported("transformers.modeling_utils", self._watch_models)

    def begin(self) -> None:
        """Begin again, with nothing loaded."""
        self._began_s = time.monotonic()
        self._longest_s = 0.0
        self._what = ""
        self.total_s = 0.0

    @property
    def what(self) -> str:
        """The name of what took longest to load; "" if loading took a small part of the time since
        the beginning.
        """
        share = self.total_s / max(time.monotonic() - self._began_s, self.total_s, 1e-9)
        is_worth_it = self.total_s > _WORTH_S and share > _WORTH_SHARE
        return self._what if is_worth_it else ""

    def _watch_models(self, module: ModuleType) -> None:
        models: Any = module.PreTrainedModel
        original = vars(models)["from_pretrained"].__func__

        @functools.wraps(original)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._timed(functools.partial(original, cls), *args, **kwargs)

        models.from_pretrained = classmethod(from_pretrained)

    def _timed(self, load: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_loading or threading.get_ident() != self._thread:
            return load(*args, **kwargs)
        self._is_loading = True
        began_s = time.monotonic()
        try:
            return load(*args, **kwargs)
        finally:
            self._is_loading = False
            source = [*args, *kwargs.values(), None][0]
            took_s = time.monotonic() - began_s
            self.total_s += took_s
            if took_s > self._longest_s:
                self._longest_s = took_s
                is_name = isinstance(source, str) or hasattr(source, "__fspath__")
                self._what = str(source) if is_name else "a file"
