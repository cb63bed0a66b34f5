"""One rank of a sharded model: runs all cases, and writes what came of each as JSON.

``python -m support.rank_worker FOLDER``, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import os
import sys
import time
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


if __name__ == "__main__":
    of_test = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        # Every run of every case compares the two ranks' state.
        patch.setattr("speccompile.ranks.ranks.COMPARE_EVERY", 1)
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: of_test / "captures")
        # One width of prompt chunks for each max_len: fewer steps are built.
        patch.setattr("speccompile.compiler.layout.PREFILL_WIDTHS", (16, 512))
        main(of_test)
    # What a rank that was lost has left is not waited for.
    os._exit(0)
