"""The ranks of a sharded model: each runs all cases, and writes what came of each as JSON.

``python -m support.rank_worker FOLDER PORT``. It starts two ranks as forks, which share what it has imported, and
ends with the exit codes of both as JSON in ``codes``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from speccompile.errors import SpecCompileError
from support.rank_cases import CASES
from support.rank_faults import FAULTS


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=DistributedConfig(tp_size=2))
    rank = int(os.environ["RANK"])
    for name, case in (CASES | FAULTS).items():
        started = time.perf_counter()
        try:
            result: Any = {"result": case(model.eval(), rank, folder)}
        except SpecCompileError as error:
            result = {"error": type(error).__name__, "message": str(error)}
        result["seconds"] = time.perf_counter() - started
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))


def forked(rank: int, folder: Path, port: str) -> int:
    """The process of a rank. This one computes nothing with torch before."""
    process = os.fork()
    if process:
        return process
    of_torch = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= of_torch | {"MASTER_PORT": port}
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        main(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        # What a rank that was lost has left is not waited for.
        os._exit(code)


if __name__ == "__main__":
    of_test = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        # Every run of every case compares the two ranks' state.
        patch.setattr("speccompile.ranks.ranks.COMPARE_EVERY", 1)
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: of_test / "captures")
        # One width of prompt chunks for each max_len: fewer steps are built.
        patch.setattr("speccompile.compiler.layout.PREFILL_WIDTHS", (16, 512))
        processes = [forked(rank, of_test, sys.argv[2]) for rank in (0, 1)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    (of_test / "codes").write_text(json.dumps(codes))
