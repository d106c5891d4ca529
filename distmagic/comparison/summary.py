"""The summary of a run for comparisons.

It is small, whatever the run's length and number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from distmagic.remote.frozen import frozen
from distmagic.render.curves import CurveLine, curve_of, joined
from distmagic.render.text_width import cut_middle, one_line
from distmagic.state.model import RunState

_MAX_METRICS = 12
_MAX_RANKS = 64  # ranks whose curves are used: a thousand would take seconds
_POINTS = 60  # points of a curve
_LABEL = 60  # characters of a label
_CALL = 2000  # characters
# Parts of a metric's name that mean higher is better. For all other metrics, such as a loss, lower
# is better.
_MORE_IS_BETTER = frozenset(
    ("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "fps", "iou", "map", "map50", "miou", "precision",
     "psnr", "r2", "recall", "return", "reward", "rouge", "score", "ssim", "success", "throughput", "top1", "top5")
)  # fmt: skip
# Parts of a name that mean no value is best, a schedule or a magnitude, unless another part says
# which.
_NO_BEST = frozenset(("epoch", "lr", "rate", "step"))
_MAGNITUDES = frozenset(("gnorm", "norm", "scale"))
_LESS_IS_BETTER = frozenset(("err", "error", "loss"))
_A_SECOND = re.compile(r"\bper s(ec(ond)?)?\b")


@frozen
class MetricSummary(CurveLine):
    """One metric of one run: the mean of the last values of its ranks, and the best value of any
    rank.

    With more than 64 ranks, the best value and the curve come from 64 of them. `best` is None if no
    value was a number. `bins` are the points of the curve, averaged over ranks; x is the step, or
    seconds if not `by_step`. `holes` are the first and last x of stretches that can't be drawn,
    such as NaN.
    """

    best: float | None
    by_step: bool


@frozen
class RunSummary:
    """The summary of one run.

    `label` is its --name, else its `call` as the user wrote it, else its job's name.
    """

    job: str
    call: str
    label: str
    phase: str
    took_s: float
    ranks: int
    # By name, in the order in which they were reported.
    metrics: Mapping[str, MetricSummary]
    note: str = ""  # why the run never began


def summary(state: RunState) -> RunSummary:
    """Return the summary of a run."""
    names = dict.fromkeys(name for table in state.series.values() for name in table)
    stride = -(-len(state.series) // _MAX_RANKS) or 1
    ranks = sorted(state.series)[::stride]
    few = replace(state, series={rank: state.series[rank] for rank in ranks})
    metrics = {}
    for name in list(names)[:_MAX_METRICS]:
        lasts = [table[name][-1].value for table in state.series.values() if name in table]  # fmt: skip
        last = sum(lasts) / len(lasts)
        curve = curve_of(few, name, _POINTS)
        pick = max if more_is_better(name) else min
        extremes = [one.high if pick is max else one.low for one in curve.bins]  # fmt: skip
        metrics[name] = MetricSummary(
            last=last,
            best=pick(extremes, default=None),
            bins=joined(curve).bins,
            holes=tuple(curve.all_holes),
            by_step=curve.by_step,
        )
    return RunSummary(
        job=state.job,
        call=state.terms.call if len(state.terms.call) <= _CALL else "",
        label=cut_middle(one_line(state.name or state.terms.call or state.job), _LABEL),
        phase=state.phase,
        took_s=state.before_s + state.at_s,
        ranks=state.world_size or len(state.workers),
        metrics=metrics,
    )


def more_is_better(name: str) -> bool:
    """Whether a metric is better when higher, judged by its name: `val_acc`, `eval/F1`,
    `tokens_per_sec`.
    """
    words = _words(name)
    if not _LESS_IS_BETTER.isdisjoint(words):
        return False
    is_rate = _A_SECOND.search(" ".join(words)) is not None
    return is_rate or not _MORE_IS_BETTER.isdisjoint(words)


def has_best(name: str) -> bool:
    """Whether values of a metric can be better or worse, judged by its name.

    `lr` and `grad_norm` have no best value.
    """
    words = _words(name)
    if not _MAGNITUDES.isdisjoint(words):
        return False
    is_less = not _LESS_IS_BETTER.isdisjoint(words)
    return is_less or more_is_better(name) or _NO_BEST.isdisjoint(words)


def _words(name: str) -> list[str]:
    """Return the words of a name, with those of camel case both apart and together: trainAcc, and
    mAP.
    """
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return re.split(r"[^a-z0-9]+", f"{apart} {name}".lower())
