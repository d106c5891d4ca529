"""Questions as users ask them, in their own words: the manual's first answer is the right one."""

import pytest

from distmagic.notebook import help_pages

PAGES = {topic: help_pages.page(topic) for topic in help_pages.topics()}
QUESTIONS = (
    (
        "jump host with another key",
        "A jump host (bastion, login node, ProxyJump) with another or different key (identity file)",
    ),
    (
        "bastion",
        "A jump host (bastion, login node, ProxyJump) with another or different key (identity file)",
    ),
    (
        "module load",
        "Environment modules (module load, Lmod), or a shell command before the run",
    ),
    (
        "environment modules",
        "Environment modules (module load, Lmod), or a shell command before the run",
    ),
    (
        "conda and modules",
        "Environment modules (module load, Lmod), or a shell command before the run",
    ),
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
    (
        "debug a rank",
        "Debug a rank (step through its code with pdb): where does training hang?",
    ),
    (
        "profile a running job",
        "Profile a training loop (torch.profiler): why is it slow, which operation takes the time?",
    ),
    (
        "huggingface trainer",
        "Lightning and Transformers (Hugging Face Trainer)",
    ),
    ("kubernetes", "Nodes of a scheduler"),
    (
        "conda",
        "Conda, Anaconda or Miniconda environment on the hosts (also mamba, venv, virtualenv, uv, Poetry)",
    ),
    (
        "only some GPUs",
        "Use only some GPUs or cards (pick, choose, select or pin the last two cards; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "logs after the kernel died",
        "Logs and output of a finished run, or after the kernel or Jupyter crashed (died)",
    ),
    (
        "my own fork of a package",
        "My own fork, git clone or changes of a package or library, or an editable install",
    ),
    (
        "20 GB of data",
        "20 GB of data: send or upload a large (big, huge) dataset or training set to all machines",
    ),
    (
        "sharded checkpoints",
        "Sharded checkpoints: gather them from all hosts, and resume",
    ),
    (
        "a different user for each host",
        "A different user (username, login name) or port for each host",
    ),
    (
        "stop everything",
        "Stop everything (kill, abort or cancel all jobs, runs or trainings)",
    ),
    (
        "NCCL uses the wrong interface",
        "Wrong network interface or subnet (NCCL_SOCKET_IFNAME), InfiniBand",
    ),
    (
        "vs code",
        "VS Code (VSCode, Visual Studio Code), Cursor and other IDEs or editors",
    ),
    ("accelerate launch", "An accelerate script (accelerate launch)"),
    ("deepspeed", "A DeepSpeed script"),
    (
        "security",
        "For a security review or audit, a company's policy: is it allowed, secure, safe or encrypted, what does it store or leave on a server?",
    ),
    (
        "resume after preemption",
        "Checkpoint, and resume or continue after preemption (a spot instance that was preempted)",
    ),
    ("tensorboard", "TensorBoard, Weights & Biases (wandb), MLflow"),
    ("wandb", "TensorBoard, Weights & Biases (wandb), MLflow"),
    (
        "torch.profiler",
        "Profile a training loop (torch.profiler): why is it slow, which operation takes the time?",
    ),
    (
        "mixed CPU and GPU hosts",
        "Mixed (heterogeneous) hosts: some nodes with GPUs, others without (only CPUs, no GPU)",
    ),
    (
        "some hosts have GPUs, others only CPU",
        "Mixed (heterogeneous) hosts: some nodes with GPUs, others without (only CPUs, no GPU)",
    ),
    (
        "how do I kill a run that is stuck",
        "Stop everything (kill, abort or cancel all jobs, runs or trainings)",
    ),
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
    ("windows", "A Windows PC, computer or laptop (WSL)"),
    ("windows laptop", "A Windows PC, computer or laptop (WSL)"),
    ("WSL", "A Windows PC, computer or laptop (WSL)"),
    ("mac", "A Mac laptop (macOS, OS X, MacBook, Apple silicon, M1 to M4)"),
    (
        "two users share a host",
        "Two users or notebooks on the same host: people who share machines",
    ),
    ("jupyterhub", "JupyterHub: a hub with notebooks for everybody"),
    ("docker without sudo", "Docker or Podman containers, without sudo"),
    ("ipv6", "IPv6 (v6) addresses"),
    (
        "firewall port range",
        "Firewall: which ports must be open between the hosts, and a range of ports",
    ),
    ("ssh certificates", "SSH certificates (keys signed by a CA)"),
    ("NCCL_DEBUG", "Verbose logs of NCCL and torch (NCCL_DEBUG)"),
    (
        "infiniband",
        "Wrong network interface or subnet (NCCL_SOCKET_IFNAME), InfiniBand",
    ),
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
    (
        "poetry",
        "Conda, Anaconda or Miniconda environment on the hosts (also mamba, venv, virtualenv, uv, Poetry)",
    ),
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
        "Logs and output of a finished run, or after the kernel or Jupyter crashed (died)",
    ),
    ("print shows nothing", "print shows nothing: where is the output?"),
    ("early stopping", "Early stopping: all ranks stop at the same step"),
    ("mlflow", "TensorBoard, Weights & Biases (wandb), MLflow"),
    (
        "training hangs",
        "Debug a rank (step through its code with pdb): where does training hang?",
    ),
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
        "For a security review or audit, a company's policy: is it allowed, secure, safe or encrypted, what does it store or leave on a server?",
    ),
    ("TPU", "What distmagic does not do"),
    ("uninstall", "Remove everything from the hosts (uninstall, deinstall, delete)"),
    (
        "kernel crashed stdout lost",
        "Logs and output of a finished run, or after the kernel or Jupyter crashed (died)",
    ),
    (
        "patched transformers locally",
        "My own fork, git clone or changes of a package or library, or an editable install",
    ),
    (
        "login name differs per host",
        "A different user (username, login name) or port for each host",
    ),
    (
        "cancel all running jobs",
        "Stop everything (kill, abort or cancel all jobs, runs or trainings)",
    ),
    (
        "vscode",
        "VS Code (VSCode, Visual Studio Code), Cursor and other IDEs or editors",
    ),
    (
        "IT approve telemetry",
        "For a security review or audit, a company's policy: is it allowed, secure, safe or encrypted, what does it store or leave on a server?",
    ),
    (
        "one node has no GPU",
        "Mixed (heterogeneous) hosts: some nodes with GPUs, others without (only CPUs, no GPU)",
    ),
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
    (
        "install conda",
        "Conda, Anaconda or Miniconda environment on the hosts (also mamba, venv, virtualenv, uv, Poetry)",
    ),
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
        "Profile a training loop (torch.profiler): why is it slow, which operation takes the time?",
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
        "For a security review or audit, a company's policy: is it allowed, secure, safe or encrypted, what does it store or leave on a server?",
    ),
    ("mac laptop", "A Mac laptop (macOS, OS X, MacBook, Apple silicon, M1 to M4)"),
    ("apple silicon", "A Mac laptop (macOS, OS X, MacBook, Apple silicon, M1 to M4)"),
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
    (
        "lmod",
        "Environment modules (module load, Lmod), or a shell command before the run",
    ),
    (
        "CUDA_VISIBLE_DEVICES",
        "Use only some GPUs or cards (pick, choose, select or pin the last two cards; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "choose GPUs",
        "Use only some GPUs or cards (pick, choose, select or pin the last two cards; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "which ports must be open",
        "Firewall: which ports must be open between the hosts, and a range of ports",
    ),
    (
        "why is my training slow",
        "Profile a training loop (torch.profiler): why is it slow, which operation takes the time?",
    ),
    (
        "my model does not fit on one gpu",
        "A model that does not fit on one GPU (too big for its memory): FSDP",
    ),
    ("fsdp", "A model that does not fit on one GPU (too big for its memory): FSDP"),
    (
        "hosts have different torch versions",
        "Hosts have different versions of torch or PyTorch (version mismatch)",
    ),
    (
        "torch version mismatch between machines",
        "Hosts have different versions of torch or PyTorch (version mismatch)",
    ),
    (
        "the other cards are taken, pin the run to two of the cards",
        "Use only some GPUs or cards (pick, choose, select or pin the last two cards; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "use only second and third gpu",
        "Use only some GPUs or cards (pick, choose, select or pin the last two cards; CUDA_VISIBLE_DEVICES)",
    ),
    (
        "jupyter crashed, where can I see what my run printed",
        "Logs and output of a finished run, or after the kernel or Jupyter crashed (died)",
    ),
    (
        "my training set is huge, how do I get it to the machines",
        "20 GB of data: send or upload a large (big, huge) dataset or training set to all machines",
    ),
    (
        "one machine has no gpu, the other has four",
        "Mixed (heterogeneous) hosts: some nodes with GPUs, others without (only CPUs, no GPU)",
    ),
    (
        "I only have Windows on my notebook computer",
        "A Windows PC, computer or laptop (WSL)",
    ),
    (
        "use the anaconda environment that is already on the machines",
        "Conda, Anaconda or Miniconda environment on the hosts (also mamba, venv, virtualenv, uv, Poetry)",
    ),
    (
        "gpu is used by somebody else",
        "Two users or notebooks on the same host: people who share machines",
    ),
    (
        "our lab has a hub with notebooks for everybody, can I use it there",
        "JupyterHub: a hub with notebooks for everybody",
    ),
    (
        "how to run a shell command before the job starts",
        "Environment modules (module load, Lmod), or a shell command before the run",
    ),
    (
        "nccl picks docker0 instead of eth0",
        "Wrong network interface or subnet (NCCL_SOCKET_IFNAME), InfiniBand",
    ),
    (
        "login name differs from machine to machine",
        "A different user (username, login name) or port for each host",
    ),
    (
        "kill all my runs right now",
        "Stop everything (kill, abort or cancel all jobs, runs or trainings)",
    ),
    (
        "find out what is slow in my training step",
        "Profile a training loop (torch.profiler): why is it slow, which operation takes the time?",
    ),
)


# In words that the right page does not have.
SYNONYMS = (
    ("pick which gpus to use", "Use only some GPUs"),
    ("use just the last two cards of a server", "Use only some GPUs"),
    ("kill all trainings and free the GPUs", "Stop everything"),
    ("git clone of a library with my changes", "My own fork"),
    ("IDE support", "VS Code"),
    ("W&B", "TensorBoard, Weights & Biases"),
    ("which operation takes the time", "Profile a training loop"),
    ("virtualenv with mamba", "Conda, Anaconda or Miniconda environment"),
    ("only v6 network", "IPv6"),
    ("osx M2", "A Mac laptop"),
    ("radeon", "AMD GPUs"),
    ("MI300 rocm", "AMD GPUs"),
    ("step through the code of one rank", "Debug a rank"),
    ("deinstall", "Remove everything from the hosts"),
    ("tunnel through a gateway machine with a separate key", "A jump host"),
    ("hop over an intermediate server", "A jump host"),
    ("upload a giant corpus once", "20 GB of data"),
    (
        "I hacked a pip library locally",
        "My own fork, git clone or changes of a package or library",
    ),
    ("visualize the loss in a dashboard", "TensorBoard, Weights & Biases"),
    ("flame graph of my step", "Profile a training loop"),
    ("restore weights after eviction", "Checkpoint, and resume"),
    ("share the box with a coworker", "Two users or notebooks"),
    ("some workers lack a graphics card", "Mixed (heterogeneous) hosts"),
    ("questionnaire of the infosec team", "For a security review"),
    ("deadlocked ranks", "Debug a rank"),
    ("multi-user notebook server", "JupyterHub"),
    ("encryption", "For a security review"),
    ("is it allowed by my security department", "For a security review"),
    ("one host without GPU", "Mixed (heterogeneous) hosts"),
    ("hosts with and without GPU", "Mixed (heterogeneous) hosts"),
    ("miniconda", "Conda, Anaconda or Miniconda"),
)


@pytest.mark.parametrize(("question", "heading"), QUESTIONS)
def test_the_first_answer_is_the_right_one(question, heading):
    assert help_pages.search(question.split(), PAGES)[0].heading == heading


@pytest.mark.parametrize(("question", "beginning"), SYNONYMS)
def test_synonyms_lead_to_the_right_answer(question, beginning):
    assert help_pages.search(question.split(), PAGES)[0].heading.startswith(beginning)


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
        ("model does not fit on one gpu", ["fully_shard(part)", "train(steps=5)"]),
        ("ssh certificate expired", ["has expired", "ssh-keygen -L"]),
    ],
)
def test_the_first_answer_is_whole(question, words):
    """No row of a table alone, nor half a recipe."""
    text = help_pages.search(question.split(), PAGES)[0].text
    assert [word for word in words if word not in text] == []
