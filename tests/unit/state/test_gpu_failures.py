"""Errors of GPUs, as torch and CUDA word them, and what a user reads of them."""

from dataclasses import replace

import pytest

from distmagic.failures import failure_kind
from distmagic.remote.system import exit_codes, memory
from distmagic.remote.wire import protocol as p
from distmagic.state.events import Gone
from distmagic.state.fold import fold
from distmagic.state.verdict import verdict
from tests.builders.events import at, begun, ended, output, raised

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 9.81 GiB is free. "
    "Including non-PyTorch memory, this process has 69.33 GiB memory in use. Of the allocated memory 68.00 GiB is "
    "allocated by PyTorch, and 823.61 MiB is reserved by PyTorch but unallocated."
)
ASSERTION = (
    "CUDA error: device-side assert triggered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
SAID = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:94: operator(): block: [0,0,0], thread: [0,0,0] "
    'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.'
)


@pytest.mark.parametrize(
    "text",
    [
        f"OutOfMemoryError: {OUT_OF_MEMORY}",
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`",
        "OutOfMemoryError: HIP out of memory. Tried to allocate 2 GiB.",
        f"AcceleratorError: {ASSERTION}",
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.",
        "ValueError: out of memory",
        "",
    ],
)
def test_what_an_error_says_of_its_gpu(text, golden):
    golden(failure_kind.cure_in_words(text, "gpu-a"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("OutOfMemoryError", OUT_OF_MEMORY), ("AcceleratorError", ASSERTION)],
)
def test_the_error_of_the_run_says_it_too(kind, message, golden):
    failure = p.Failure(type=kind, message=message, traceback="Traceback")
    state = begun(
        output(f"{SAID}\n", stream="stderr"),
        ended(0, outcome="raised", code=1, failure=failure),
    )
    error = verdict(fold(state, [at(Gone(), node) for node in (0, 1)]))
    golden(error)


@pytest.mark.parametrize(
    "text",
    [
        "AcceleratorError: CUDA error: invalid device ordinal",
        "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 2000",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "AssertionError: Torch not compiled with CUDA enabled",
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
        ("DistNetworkError: The server socket has failed to listen on any local network address. port: 29872, useIpv6: "
         "false, code: -98, name: EADDRINUSE, message: address already in use"),
        "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
        "NameError: name 'dist' is not defined",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        "ValueError: name 'model' is not defined",
        "TimeoutError: my own timed out",
    ],
)  # fmt: skip
def test_errors_that_everybody_meets_say_what_to_do(text, golden):
    golden(failure_kind.cure_in_words(text, "gpu-a"))


def test_a_rank_that_the_watchdog_has_aborted_says_what_to_do():
    said = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what(): Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    state = begun(output(said, stream="stderr"), ended(0, outcome="signalled", code=-6))
    error = verdict(fold(state, [at(Gone(), node) for node in (0, 1)]))
    assert "A rank waited longer than the time limit" in error.hint


def test_another_error_is_not_explained_by_what_nccl_warned_of():
    said = "gpu-a:1:2 NCCL WARN socketStartConnect: Connect to 10.0.0.2<43421> failed : Software caused connection abort\n"
    state = begun(output(said, stream="stderr"), raised(0, 0, "shape mismatch"))
    error = verdict(fold(state, [at(Gone(), node) for node in (0, 1)]))
    assert "could not reach" not in error.hint


def test_a_missing_name_on_a_rank_that_stays(golden):
    text = "NameError: name 'dist' is not defined"
    golden(failure_kind.cure_in_words(text, "gpu-a", stays=True))


@pytest.mark.parametrize(
    "text", ["BdbQuit: ", "EOFError: EOF when reading a line", "EOFError: "]
)
def test_a_rank_that_was_left_without_an_answer_says_who_can_give_one(text, golden):
    golden(failure_kind.cure_in_words(text, "gpu-a"))
    assert failure_kind.cure_in_words("EOFError: Ran out of input", "gpu-a") == ""


def test_the_cure_stands_in_the_error_of_the_run(golden):
    text = "Distributed package doesn't have NCCL built in"
    state = begun(raised(1, 0, text))
    error = verdict(fold(state, [at(Gone(), node) for node in (0, 1)]))
    assert error is not None
    golden(error)


LOOK = p.Hardware(
    cpu_utilization=0.5,
    used_bytes=200 * 10**9,
    total_bytes=256 * 10**9,
    gpus=(
        p.Gpu(used_bytes=1, total_bytes=80 * 10**9),
        p.Gpu(used_bytes=79 * 10**9, total_bytes=80 * 10**9),
    ),
)
LATER = replace(
    LOOK,
    used_bytes=10,
    gpus=(LOOK.gpus[0], p.Gpu(used_bytes=5, total_bytes=80 * 10**9)),
)


def test_peaks_of_gpus_are_kept():
    node = begun(at(LOOK), at(LATER)).nodes[0]
    assert node.hardware == LATER
    assert node.gpu_peaks == (1, 79 * 10**9)


def test_a_rank_that_was_killed_for_want_of_memory_says_so(golden):
    meaning = exit_codes.meaning_of(-9, out_of_memory=memory.HOST_WIDE)
    end = ended(0, outcome="signalled", code=-9, meaning=meaning)
    golden(verdict(fold(begun(end), [at(Gone(), node) for node in (0, 1)])))
