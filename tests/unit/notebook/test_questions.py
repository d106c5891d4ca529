"""Questions as users ask them, in their own words: the manual's first answer is the right one."""

import pytest

from distmagic.notebook import help_pages

PAGES = {topic: help_pages.page(topic) for topic in help_pages.topics()}
QUESTIONS = (
    (
        "jump host with another key",
        "A jump host (bastion, ProxyJump) with another or different key (identity file)",
    ),
    (
        "bastion",
        "A jump host (bastion, ProxyJump) with another or different key (identity file)",
    ),
    ("module load", "Environment modules (module load, Lmod)"),
    ("environment modules", "Environment modules (module load, Lmod)"),
    ("conda and modules", "Environment modules (module load, Lmod)"),
    (
        "two users",
        "Two users or notebooks on the same host: people who share machines",
    ),
    (
        "keep training when the laptop is closed",
        "Detached jobs: close the laptop, keep training, come back later",
    ),
    (
        "close the laptop",
        "Detached jobs: close the laptop, keep training, come back later",
    ),
    (
        "change code without loading the model again",
        "Change code without loading the model again",
    ),
    (
        "keep the model in memory between cells",
        "Change code without loading the model again",
    ),
    (
        "reload the model every time",
        "Change code without loading the model again",
    ),
    ("a debugger on rank 2", "A debugger in one rank (pdb, breakpoint)"),
    ("pdb", "A debugger in one rank (pdb, breakpoint)"),
    ("debug a rank", "Debug a rank: where does training hang?"),
    (
        "profile a running job",
        "Profile a training loop (torch.profiler): why is it slow?",
    ),
    (
        "huggingface trainer",
        "Lightning and Transformers (Hugging Face Trainer)",
    ),
    ("kubernetes", "Nodes of a scheduler"),
    ("conda", "Conda environment on the hosts (also venv, uv, Poetry)"),
    (
        "only some GPUs",
        "Use only some GPUs (choose GPUs 2 and 3; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "logs after the kernel died",
        "Logs and output of a finished run, or after the kernel died",
    ),
    ("my own fork of a package", "My own fork of a package, or an editable install"),
    ("20 GB of data", "20 GB of data: send a large (big) dataset"),
    (
        "sharded checkpoints",
        "Sharded checkpoints: gather them from all hosts, and resume",
    ),
    (
        "a different user for each host",
        "A different user (username) or port for each host",
    ),
    ("stop everything", "Stop everything (kill all jobs)"),
    (
        "NCCL uses the wrong interface",
        "Wrong network interface (NCCL_SOCKET_IFNAME), InfiniBand",
    ),
    ("vs code", "VS Code (VSCode, Visual Studio Code), Cursor"),
    ("accelerate launch", "An accelerate script (accelerate launch)"),
    ("deepspeed", "A DeepSpeed script"),
    (
        "security",
        "For a security review or audit, a company's policy: is it secure or safe, what does it store or leave on a server?",
    ),
    (
        "resume after preemption",
        "Checkpoint, and resume or continue after preemption (a spot instance that was preempted)",
    ),
    ("tensorboard", "TensorBoard, Weights & Biases (wandb), MLflow"),
    ("wandb", "TensorBoard, Weights & Biases (wandb), MLflow"),
    (
        "torch.profiler",
        "Profile a training loop (torch.profiler): why is it slow?",
    ),
    (
        "mixed CPU and GPU hosts",
        "Mixed hosts: some nodes have GPUs, others only CPUs",
    ),
    (
        "some hosts have GPUs, others only CPU",
        "Mixed hosts: some nodes have GPUs, others only CPUs",
    ),
    ("how do I kill a run that is stuck", "Stop everything (kill all jobs)"),
    (
        "use a different python on one host",
        "Choose the Python of all hosts, or a different one on one host",
    ),
    ("permission denied publickey", "Connecting to hosts"),
    ("wait until the GPUs are free", "When devices are taken"),
    ("my laptop goes to sleep during training", "When the notebook goes away"),
    (
        "send my local module to the workers",
        "What travels: variables, functions, local modules",
    ),
    (
        "continue training from yesterday's checkpoint",
        "Checkpoint, and resume or continue after preemption (a spot instance that was preempted)",
    ),
    ("which node is slow", "How fast hosts are together: which node or link is slow?"),
    ("install pytorch on all nodes", "Install the same packages on every host"),
    ("same random seed on all ranks", "The notebook is not a rank"),
    ("windows", "A Windows PC or laptop (WSL)"),
    ("windows laptop", "A Windows PC or laptop (WSL)"),
    ("WSL", "A Windows PC or laptop (WSL)"),
    ("mac", "A Mac laptop (macOS, MacBook, Apple silicon)"),
    (
        "two users share a host",
        "Two users or notebooks on the same host: people who share machines",
    ),
    ("jupyterhub", "JupyterHub"),
    ("docker without sudo", "Docker or Podman containers, without sudo"),
    ("ipv6", "IPv6 addresses"),
    (
        "firewall port range",
        "Firewall: which ports must be open between the hosts, and a range of ports",
    ),
    ("ssh certificates", "SSH certificates (signed keys)"),
    ("NCCL_DEBUG", "Verbose logs of NCCL and torch (NCCL_DEBUG)"),
    ("infiniband", "Wrong network interface (NCCL_SOCKET_IFNAME), InfiniBand"),
    (
        "two factor authentication",
        "Passwords and two-factor authentication (one-time codes)",
    ),
    ("password login", "Passwords and two-factor authentication (one-time codes)"),
    (
        "security group",
        "Machines of a cloud (AWS EC2) with a key file (.pem)",
    ),
    (
        "offline cluster without internet",
        "Hosts without internet (offline): a proxy or a private index",
    ),
    ("poetry", "Conda environment on the hosts (also venv, uv, Poetry)"),
    (
        "copy the trained model back to my laptop",
        "Bring checkpoints and files back: copy a model to the laptop",
    ),
    (
        "environment variable for all ranks",
        "Environment variables of the ranks; secrets, tokens and API keys",
    ),
    (
        "see output of a finished run",
        "Logs and output of a finished run, or after the kernel died",
    ),
    ("print shows nothing", "print shows nothing: where is the output?"),
    ("early stopping", "Early stopping: all ranks stop at the same step"),
    ("mlflow", "TensorBoard, Weights & Biases (wandb), MLflow"),
    ("training hangs", "Debug a rank: where does training hang?"),
    (
        "hyperparameter search",
        "A sweep (hyperparameter search): several runs side by side",
    ),
    (
        "data loader workers",
        "DataLoader workers (data loader), and shared memory (/dev/shm)",
    ),
    ("/dev/shm", "DataLoader workers (data loader), and shared memory (/dev/shm)"),
    (
        "notify me when the run is finished",
        "A message when the run ends (notify, e-mail)",
    ),
    (
        "more than one notebook on the same hosts",
        "Two users or notebooks on the same host: people who share machines",
    ),
    ("compare two runs", "Compare two or more runs side by side"),
    ("api reference", "From a Python program: distmagic.run (API reference)"),
    ("limit the run time", "How long a run may take: time limits"),
    (
        "change the number of ranks",
        "torchrun's flags: change the number of ranks, hosts and restarts",
    ),
    (
        "why is the first run slow",
        "Warm processes: why the first run is slow, and the second starts at once",
    ),
    ("debugger", "A debugger in one rank (pdb, breakpoint)"),
    ("elastic training", "Elastic jobs: hosts that come and go"),
    ("what is a rank", "Words: rank, host, node, job, run: what is the difference?"),
    (
        "difference between node and host",
        "Words: rank, host, node, job, run: what is the difference?",
    ),
    (
        "set up a cluster on AWS",
        "Before the first run: install SkyPilot, or set up a cluster on AWS or another cloud",
    ),
    (
        "corporate audit",
        "For a security review or audit, a company's policy: is it secure or safe, what does it store or leave on a server?",
    ),
    ("TPU", "What distmagic does not do"),
    ("uninstall", "Remove everything from the hosts (uninstall)"),
    (
        "kernel crashed stdout lost",
        "Logs and output of a finished run, or after the kernel died",
    ),
    (
        "patched transformers locally",
        "My own fork of a package, or an editable install",
    ),
    (
        "login name differs per host",
        "A different user (username) or port for each host",
    ),
    ("cancel all running jobs", "Stop everything (kill all jobs)"),
    ("vscode", "VS Code (VSCode, Visual Studio Code), Cursor"),
    (
        "IT approve telemetry",
        "For a security review or audit, a company's policy: is it secure or safe, what does it store or leave on a server?",
    ),
    ("one node has no GPU", "Mixed hosts: some nodes have GPUs, others only CPUs"),
    (
        "colleague uses the same GPUs",
        "Two users or notebooks on the same host: people who share machines",
    ),
    (
        "ping another host",
        "Check the connection between two hosts by hand (ping, telnet)",
    ),
    ("telnet", "Check the connection between two hosts by hand (ping, telnet)"),
    (
        "EC2 machine with a pem key",
        "Machines of a cloud (AWS EC2) with a key file (.pem)",
    ),
    (
        "different number of GPUs per host",
        "Hosts with different numbers of GPUs or ranks",
    ),
    ("install conda", "Conda environment on the hosts (also venv, uv, Poetry)"),
    ("minGPT", "minGPT of PyTorch's examples"),
    (
        "DistributedSampler",
        "From one process to many ranks: DistributedSampler, learning rate, evaluation",
    ),
    (
        "learning rate for more ranks",
        "From one process to many ranks: DistributedSampler, learning rate, evaluation",
    ),
    (
        "four GPUs in one host or four hosts",
        "Four GPUs in one host, or four hosts? (latency, bandwidth)",
    ),
    ("what is distributed training", "What is distributed training?"),
    (
        "torchrun command by hand",
        "torchrun's command by hand, and its flags one by one",
    ),
    (
        "output file of a Slurm job",
        "A batch script without a notebook: submit, watch, output file, scancel",
    ),
    (
        "offset size world_size",
        "A script that starts its own ranks by --offset, --size and --world_size",
    ),
    (
        "install SkyPilot",
        "Before the first run: install SkyPilot, or set up a cluster on AWS or another cloud",
    ),
    ("CIFAR-10", "Learn it: the course, notebook by notebook"),
    ("overhead", "How fast or slow is it: overhead"),
    ("how slow is it", "How fast or slow is it: overhead"),
    ("nan", "Loss is NaN: find the rank and the step"),
    ("loss is nan", "Loss is NaN: find the rank and the step"),
    (
        "CPU RAM OOM killed",
        "Out of memory (CUDA, or CPU RAM: killed by the OOM killer): find the rank",
    ),
    (
        "killed by OOM killer",
        "Out of memory (CUDA, or CPU RAM: killed by the OOM killer): find the rank",
    ),
    (
        "use as a python script without jupyter",
        "A terminal (command line): run a Python script without a notebook or Jupyter",
    ),
    (
        "without a notebook",
        "A terminal (command line): run a Python script without a notebook or Jupyter",
    ),
    ("how do I add another host to a running job", "Add another host to a running job"),
    ("what is left on the hosts", "What is kept or left on a host"),
    ("change learning rate while training", "Change the learning rate while training"),
    (
        "profile my training loop",
        "Profile a training loop (torch.profiler): why is it slow?",
    ),
    (
        "spot instance preempted continue",
        "Checkpoint, and resume or continue after preemption (a spot instance that was preempted)",
    ),
    (
        "two people share the same machines",
        "Two users or notebooks on the same host: people who share machines",
    ),
    (
        "what does it store or leave on the server",
        "For a security review or audit, a company's policy: is it secure or safe, what does it store or leave on a server?",
    ),
    ("mac laptop", "A Mac laptop (macOS, MacBook, Apple silicon)"),
    ("apple silicon", "A Mac laptop (macOS, MacBook, Apple silicon)"),
    (
        "compared with accelerate launch",
        "Accelerate compared with distmagic: what is the difference? (vs)",
    ),
    (
        "difference to accelerate launch",
        "Accelerate compared with distmagic: what is the difference? (vs)",
    ),
    (
        "distmagic vs accelerate",
        "Accelerate compared with distmagic: what is the difference? (vs)",
    ),
    (
        "compared with ray",
        "Compared with other tools: what is the difference? (alternatives, vs)",
    ),
    (
        "difference to submitit",
        "Compared with other tools: what is the difference? (alternatives, vs)",
    ),
    ("lmod", "Environment modules (module load, Lmod)"),
    (
        "CUDA_VISIBLE_DEVICES",
        "Use only some GPUs (choose GPUs 2 and 3; CUDA_VISIBLE_DEVICES)",
    ),
    ("choose GPUs", "Use only some GPUs (choose GPUs 2 and 3; CUDA_VISIBLE_DEVICES)"),
    (
        "which ports must be open",
        "Firewall: which ports must be open between the hosts, and a range of ports",
    ),
    (
        "why is my training slow",
        "Profile a training loop (torch.profiler): why is it slow?",
    ),
)


@pytest.mark.parametrize(("question", "heading"), QUESTIONS)
def test_the_first_answer_is_the_right_one(question, heading):
    assert help_pages.search(question.split(), PAGES)[0].heading == heading


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            "does my company's security allow it",
            ["Telemetry", "What listens on hosts?"],
        ),
        (
            "port range allowed by the firewall",
            ["32768 to 60999", "ip_local_port_range"],
        ),
        ("patched transformers", ["pip install git+https", "%distributed env sync"]),
        ("resume after preemption", ["model.load_state_dict", "checkpoint.save"]),
    ],
)
def test_the_first_answer_is_whole(question, words):
    """No row of a table alone, nor half a recipe."""
    text = help_pages.search(question.split(), PAGES)[0].text
    assert [word for word in words if word not in text] == []
