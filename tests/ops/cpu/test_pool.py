"""The pool of threads that C++ ops share out their work in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import speccompile.ops.greatest
import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.forms.same import pack
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.sampling.host import HostCall
from speccompile.utils import workers
from speccompile.utils.workers import in_pool, out_of_pool

ops = torch.ops.speccompile
THREADS = (2, 3, 8)
#: Far above what an op of these sizes takes on a loaded machine.
PATIENCE = 120


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops("rounded") is None


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def linear(rows: int, features: int, seed: int = 0) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, 96, generator=generator), torch.randn(features, 96, generator=generator)
    packed = pack(weight)
    return lambda: ops.packed_linear(x, packed, None, features)


def rounded_linear(form: Form, rows: int, features: int) -> Callable[[], torch.Tensor]:
    x, packed = torch.randn(rows, 96), form.pack(torch.randn(features, 96))
    return lambda: form.linear(x, *packed, None, features)


def attention(width: int, places: int) -> Callable[[], torch.Tensor]:
    q = torch.randn(2, width, 4, 16)
    k, v = torch.randn(3, places, 2, 16), torch.randn(3, places, 2, 16)
    slots = torch.tensor([2, 0])
    positions = places - width + torch.arange(width).expand(2, width)
    return lambda: ops.native_attention(q, k, v, slots, positions, 0.25, None, None, None, None, None)


def choice(vocab: int) -> Callable[[], torch.Tensor]:
    scores = torch.randn(2, 3, vocab)
    return lambda: ops.choose(scores)


def cut(vocab: int) -> Callable[[], torch.Tensor]:
    scores, threshold = torch.randn(2, 3, vocab), torch.zeros(2, 3, 1)

    def run() -> torch.Tensor:
        kept = scores.clone()
        ops.mask_below_(kept, threshold)
        return kept

    return run


# Blocks of 32 outputs, 128 keys and 16,384 scores: none, one, as many as there are threads, and odd numbers of them.
WORKS = {
    "no rows": linear(0, 64),
    "one block": linear(3, 20),
    "two blocks": linear(1, 64),
    "odd blocks": linear(5, 32 * 37 + 5),
    "many blocks": linear(2, 32 * 3000),
    "int8": rounded_linear(FORMS["int8"], 70, 32 * 21),
    "int4": rounded_linear(FORMS["int4"], 70, 32 * 21),
    "attention to one key": attention(1, 1),
    "attention to many keys": attention(3, 1000),
    "attention of many queries": attention(200, 300),
    "choice": choice(100_000),
    "cut": cut(50_000),
}


@pytest.mark.parametrize("work", WORKS)
def test_the_pool_changes_no_bit_at_any_number_of_threads(work: str) -> None:
    torch.set_num_threads(1)
    wanted = WORKS[work]()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for _ in range(20):
            with in_pool(tokens=1):
                found = WORKS[work]()
            assert torch.equal(found, wanted), threads


def test_callers_in_many_threads_get_their_own_results() -> None:
    torch.set_num_threads(3)
    works = [linear(1 + i % 4, 32 * (5 + 7 * i), seed=i) for i in range(24)]
    wanted = [work() for work in works]

    def call(i: int) -> bool:
        with in_pool(tokens=1):
            return all(torch.equal(works[i](), wanted[i]) for _ in range(100))

    with ThreadPoolExecutor(len(works)) as callers:
        assert all(callers.map(call, range(len(works)), timeout=PATIENCE))


def test_a_fault_in_a_thread_reaches_the_caller_and_the_pool_goes_on() -> None:
    torch.set_num_threads(4)
    wrong = torch.zeros(40, 96, 32, dtype=torch.float64)
    good = linear(2, 32 * 40)
    wanted = good()
    for _ in range(10):
        with in_pool(tokens=1):
            with pytest.raises(RuntimeError, match="take float32"):
                ops.packed_linear(torch.randn(2, 96), wrong, None, 32 * 40)
            assert torch.equal(good(), wanted)


def test_openmp_runs_on_the_calling_thread_alone_until_the_pool_is_left() -> None:
    torch.set_num_threads(3)
    with in_pool(tokens=1):
        assert torch.get_num_threads() == 1
        with in_pool(tokens=1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(InterruptedError), in_pool(tokens=1):
        raise InterruptedError
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("nested", [False, True])
def test_an_interrupt_right_after_entering_leaves_the_pool(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    enter, leave = workers._pool()

    def interrupted(tokens: int, changed: ctypes.c_bool) -> None:
        enter(tokens, changed)
        raise KeyboardInterrupt

    with in_pool(tokens=1) if nested else contextlib.nullcontext():
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_pool", lambda: (interrupted, leave))
            with pytest.raises(KeyboardInterrupt), in_pool(tokens=1):
                pass
        # An outer step goes on in the pool.
        assert torch.get_num_threads() == (1 if nested else 3)
    assert torch.get_num_threads() == 3


def test_a_callers_code_inside_a_step_has_all_threads() -> None:
    torch.set_num_threads(3)
    with in_pool(tokens=1):
        with out_of_pool():
            assert torch.get_num_threads() == 3
            with out_of_pool(), in_pool(tokens=1):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
        with pytest.raises(InterruptedError), out_of_pool():
            raise InterruptedError
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_logits_processors_have_all_threads() -> None:
    torch.set_num_threads(3)
    seen: list[int] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return scores

    called = HostCall([processor], None, torch.tensor([[1, 2]]), 2, 8)
    with in_pool(tokens=1):
        called.run(called.processors, torch.zeros(8), torch.tensor([1, 2, 3]))
        assert torch.get_num_threads() == 1
    assert seen == [3] and called.error is None


def test_threads_set_by_a_callers_code_inside_a_step_stay() -> None:
    torch.set_num_threads(3)
    with in_pool(tokens=1), out_of_pool():
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


def test_outside_of_a_step_there_is_no_pool_to_leave() -> None:
    torch.set_num_threads(3)
    with out_of_pool():
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


def test_wide_steps_on_many_threads_stay_with_openmp() -> None:
    for threads, tokens, own in ((2, 64, True), (2, 65, False), (16, 8, True), (16, 9, False)):
        torch.set_num_threads(threads)
        with in_pool(tokens):
            assert (torch.get_num_threads() == 1) == own


# --- in processes of their own -------------------------------------------------------------------

START = """
import os, sys, threading, time, torch
import speccompile.ops.native
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.forms.same import pack
from speccompile.utils.workers import in_pool

torch.set_num_threads(1)
assert load_cpu_ops("rounded") is None
x, packed = torch.randn(2, 96), pack(torch.randn(32 * 400, 96))

def work():
    with in_pool(tokens=1):
        return torch.ops.speccompile.packed_linear(x, packed, None, 32 * 400)

def threads():
    time.sleep(0.2)
    return len(os.listdir("/proc/self/task"))
"""

FORK = """
torch.set_num_threads(3)
wanted = work()
child = os.fork()
if child == 0:
    os._exit(0 if all(torch.equal(work(), wanted) for _ in range(100)) and threads() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(work(), wanted)
"""

COUNT = """
before = threads()
for wanted in (1, 2, 5, 3):
    torch.set_num_threads(wanted)
    for _ in range(50):
        work()
    print(threads() - before)
"""

REST = """
torch.set_num_threads(3)
torch.randn(2000, 2000).relu()  # OpenMP's workers, too.
work()
time.sleep(0.2)
started = time.process_time()
time.sleep(0.5)
print(time.process_time() - started)
"""

OPENMP = """
torch.set_num_threads(3)
before = threads()
large = torch.randn(2000, 2000)
large.relu()
print(threads() - before)
work()
print(threads() - before)
"""

MKL = """
torch.set_num_threads(3)
numbers = torch.randn(4096)
before = threads()
numbers.cos()
print(threads() - before)
with in_pool(tokens=1):
    for _ in range(20):
        numbers.cos()
    print(threads() - before)
numbers.cos()
print(threads() - before)
"""

WANTED = "import os; wanted = os.sched_getaffinity(0)\n"
# OpenMP binds a thread when its first region begins. Its other threads end before the library is loaded.
BOUND_BY_OPENMP = """
import torch
from speccompile.utils.workers import release_workers
torch.set_num_threads(2)
torch.randn(2000, 2000).relu()
release_workers()
"""
BOUND_BY_THE_PROGRAM = "os.sched_setaffinity(0, {min(wanted)})\n"

CORES = """
assert len(os.sched_getaffinity(0)) == 1
torch.set_num_threads(3)
before = set(os.listdir("/proc/self/task"))
work()
time.sleep(0.2)
workers = set(os.listdir("/proc/self/task")) - before
assert len(workers) == 2
for worker in workers:
    assert os.sched_getaffinity(int(worker)) == wanted
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")

#: Each in a child of a process with one thread, which has imported all and started nothing.
CODES = {
    "fork": FORK,
    "count": COUNT,
    "rest": REST,
    "openmp": OPENMP,
    "mkl": MKL,
    "bound by the program": WANTED + BOUND_BY_THE_PROGRAM + CORES,
}
CHILDREN = """
import ast, traceback
codes = ast.literal_eval(sys.argv[1])
for name, code in codes.items():
    print("code", name, flush=True)
    child = os.fork()
    if child == 0:
        try:
            exec(code, globals())
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def run(code: str, *arguments: str, before: str = "", **environment: str) -> str:
    command = [sys.executable, "-c", f"{before}\n{START}\n{code}", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def outputs() -> dict[str, str]:
    """The output of each of ``CODES``, its error included."""
    _, *parts = run(CHILDREN, repr(CODES)).split("code ")
    return {name: output for name, _, output in (part.partition("\n") for part in parts)}


def printed(name: str) -> list[float]:
    output = outputs()[name]
    assert "Traceback" not in output, output
    return [float(line) for line in output.split()]


@linux
def test_a_forked_child_gets_workers_of_its_own() -> None:
    assert printed("fork") == []


@linux
def test_as_many_threads_work_as_torch_has() -> None:
    assert printed("count") == [0, 1, 4, 4]


@linux
def test_waiting_workers_sleep() -> None:
    (seconds,) = printed("rest")
    assert seconds < 0.1


@linux
def test_openmps_workers_end_when_a_step_begins() -> None:
    assert printed("openmp") == [2, 2]


@linux
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
def test_mkl_runs_on_the_calling_thread_alone_until_the_pool_is_left() -> None:
    """Also where the program has called ``torch.set_num_threads``, which gives MKL a number of its own."""
    assert printed("mkl") == [2, 0, 2]


@linux
def test_workers_run_on_all_cores_where_openmp_binds_its_threads() -> None:
    assert run(CORES, before=WANTED + BOUND_BY_OPENMP, OMP_PROC_BIND="true") == ""


@linux
def test_workers_run_on_all_cores_where_the_program_binds_the_caller() -> None:
    assert printed("bound by the program") == []
