"""What do the ranks of a sharded model do when one of them is killed at a random moment?

``python -m benchmarks.killed_ranks --moments 10``; exit code 1 if the other rank ends without a named error, with
another one, or later than the time-out. Of a tiny random model over two processes; it measures no speed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from speccompile import wrap
from speccompile.errors import RequestFailed

#: Seconds that a test waits for a process beyond the time-out of the ranks.
PATIENCE = 60.0
#: Names of files that processes write: before they wrap, and when the first text is there.
LOADED, DECODING = "loaded", "decoding"


@dataclass(frozen=True)
class Moment:
    """One rank was killed.

    Args:
        victim: its number.
        after: seconds since both had loaded the model.
        during: ``wrap`` or ``decoding``: what the other one did.
        error: the class of the other one's error.
        seconds: from the kill to that error.
    """

    victim: int
    after: float
    during: str
    error: str
    seconds: float


def run_rank(rank: int, port: int, model: Path, folder: Path, timeout: float) -> None:
    """Decode for ever, and write what ended it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    sharded = AutoModelForCausalLM.from_pretrained(model, distributed_config=DistributedConfig(tp_size=2)).eval()
    dist.barrier()
    during = "wrap"
    (folder / f"{LOADED}.{rank}").touch()
    error = "none"
    try:
        options: dict[str, Any] = {"backend": "eager", "max_batch": 1, "max_len": 63, "rank_timeout": timeout}
        spec = wrap(sharded, "none", tiers=(0,), **options)
        during = "decoding"
        (folder / f"{DECODING}.{rank}").touch()
        if rank:
            spec.follow()
        while rank == 0:
            requests = [spec.engine.submit([5, 6, 7, 5, 6], max_new_tokens=40) for _ in range(3)]
            for request in requests:
                request.result()
    except Exception as found:
        cause = found.__cause__ if isinstance(found, RequestFailed) else found
        error = type(cause).__name__
    answer = {"during": during, "error": error, "at": time.time()}
    (folder / f"ended.{rank}").write_text(json.dumps(answer))


def kill_at(victim: int, after: Callable[[], float], model: Path, folder: Path, timeout: float) -> Moment:
    """Start two ranks, and kill one of them ``after`` so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_forked(lambda rank=rank: run_rank(rank, port, model, folder, timeout)) for rank in (0, 1)]  # type: ignore[misc]
    try:
        _wait_for([folder / f"{LOADED}.{rank}" for rank in (0, 1)])
        started = time.time()
        time.sleep(after())
        os.kill(processes[victim], signal.SIGKILL)
        killed = time.time()
        ended = folder / f"ended.{1 - victim}"
        if not _wait_for([ended], timeout + PATIENCE, strict=False):
            return Moment(victim, killed - started, "unknown", "no end", time.time() - killed)
        answer = json.loads(ended.read_text())
        return Moment(victim, killed - started, answer["during"], answer["error"], answer["at"] - killed)
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _forked(run: Callable[[], None]) -> int:
    """A process that has what this one has imported. This one computes nothing with torch before."""
    process = os.fork()
    if process == 0:
        try:
            run()
        finally:
            sys.stdout.flush()
            os._exit(0)
    return process


def _wait_for(files: list[Path], seconds: float = 120.0, *, strict: bool = True) -> bool:
    end = time.time() + seconds
    while not all(file.exists() and (file.stat().st_size or "ended" not in file.name) for file in files):
        if time.time() > end:
            if strict:
                raise TimeoutError(f"{[file.name for file in files]} did not come")
            return False
        time.sleep(0.01)
    return True


def _tiny_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.15)).save_pretrained(folder)


def main(
    moments: Annotated[int, typer.Option(min=1, help="How often a rank is killed; the two ranks in turn.")] = 10,
    timeout: Annotated[float, typer.Option(min=1, help="wrap(rank_timeout=) of the ranks, in seconds.")] = 20.0,
    span: Annotated[float, typer.Option(min=0, help="Moments are up to so many seconds after the first text.")] = 2.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Exits with 1 when something is wrong."""
    disable_progress_bar()
    rng, found = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), Path(name, "model")
        # In a process of its own, since a process that has computed must not be forked.
        os.waitpid(_forked(lambda: _tiny_model(model)), 0)
        for number in range(moments):
            here = folder / str(number)
            here.mkdir()

            def after(here: Path = here, in_wrap: bool = number % 3 == 2) -> float:
                if in_wrap:
                    return rng.uniform(0, 1)
                _wait_for([here / f"{DECODING}.{rank}" for rank in (0, 1)])
                return rng.uniform(0, span)

            moment = kill_at(number % 2, after, model, here, timeout)
            found.append(moment)
            typer.echo(
                f"rank {moment.victim} killed after {moment.after:.2f} s, in {moment.during}: the other one raised "
                f"{moment.error} after {moment.seconds:.2f} s"
            )
    wrong = [moment for moment in found if moment.error != "RankLost" or moment.seconds > timeout]
    typer.echo(f"{len(found) - len(wrong)} of {len(found)} moments ended with RankLost within {timeout:g} s")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
