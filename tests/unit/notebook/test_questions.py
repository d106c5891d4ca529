"""Questions as users ask them, in their own words: the manual's first answer is the right one."""

from __future__ import annotations

import pytest

from distmagic.notebook import help_pages
from distmagic.notebook.help_search import search

PAGES = {topic: help_pages.page(topic) for topic in help_pages.topics()}
QUESTIONS = (
    ("jump host with another key", "A jump host (bastion) with another key"),
    ("bastion", "A jump host (bastion) with another key"),
    ("module load", "Environment modules (module load)"),
    ("conda", "Conda environment on the hosts"),
    ("only some GPUs", "Use only some GPUs (restrict a run to GPUs 2 and 3)"),
    ("logs after the kernel died", "Logs after the kernel died"),
    ("my own fork of a package", "My own fork of a package, or an editable install"),
    ("20 GB of data", "20 GB of data: send a large (big) dataset"),
    (
        "a different user for each host",
        "A different user (username) or port for each host",
    ),
    ("stop everything", "Stop everything (kill all jobs)"),
    ("NCCL uses the wrong interface", "Wrong network interface (NCCL_SOCKET_IFNAME)"),
    ("vs code", "VS Code (Visual Studio Code)"),
    ("accelerate launch", "An accelerate script (accelerate launch)"),
    ("deepspeed", "A DeepSpeed script"),
    ("security", "For a security review: is it secure?"),
    ("resume after preemption", "Checkpoint and resume after preemption"),
    ("tensorboard", "TensorBoard"),
    ("wandb", "Weights & Biases (wandb)"),
    ("torch.profiler", "Profile with torch.profiler"),
    ("mixed CPU and GPU hosts", "Hosts with and without GPUs, or with different ones"),
    ("windows", "Windows"),
    ("mac", "A Mac (macOS, MacBook)"),
    ("two users share a host", "Two users of one host"),
    ("jupyterhub", "JupyterHub"),
    ("docker without sudo", "Docker or Podman containers, without sudo"),
    ("ipv6", "IPv6 addresses"),
    ("firewall port range", "Firewall: limit gloo and NCCL to a range of ports"),
    ("ssh certificates", "SSH certificates"),
    ("NCCL_DEBUG", "Verbose logs of NCCL and torch (NCCL_DEBUG)"),
    ("uninstall", "Remove everything from the hosts (uninstall)"),
)


@pytest.mark.parametrize(("question", "heading"), QUESTIONS)
def test_the_first_answer_is_the_right_one(question, heading):
    assert search(question.split(), PAGES)[0].heading == heading
