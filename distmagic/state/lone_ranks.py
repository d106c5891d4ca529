"""Says of a run that is over whether its ranks have worked alone, which looks like success: each trained a model of its own. Pure."""

from __future__ import annotations

from distmagic.state.model import RunState


def lone_ranks_note(state: RunState) -> str:
    """Return a sentence for a run of several ranks that went well, and in which no rank did anything with another; else ""."""
    ends = [worker.ended for worker in state.workers.values()]
    if state.phase != "done" or len(ends) < 2:
        return ""
    uses = {"" if ended is None else ended.group_use for ended in ends}
    if uses == {"none"}:
        return (
            f"no rank was in a process group: the {len(ends)} ranks worked each by itself. If they are to train together, "
            "call torch.distributed.init_process_group, or make the Accelerator or Trainer, in what the ranks run"
        )
    if uses <= {"none", "unused"}:
        return (
            f"no rank made a collective call, though there was a process group: the {len(ends)} ranks worked each by "
            "itself. If they are to train together, wrap the model, in DistributedDataParallel for example"
        )
    return ""
