"""One of two processes that train a head together: whole, and in slices of which two end after one step.

``python -m support.training_worker FOLDER``, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from speccompile.training import train_head
from support.training_data import learnable, quick


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, model = int(os.environ["RANK"]), learnable()
    options = {"epochs": 8, "eval_every": 20, "batch_tokens": 128}
    whole = train_head(model, folder / "texts", folder / "whole", quick(**options), progress=False)
    stopped = []
    # The first process decides when a slice ends: the clock of the second one never does.
    for minutes in (0.0, 0.0, None) if rank == 0 else (60.0, 60.0, None):
        part = train_head(model, folder / "texts", folder / "parts", quick(**options, minutes=minutes), progress=False)
        stopped.append(part.step)
    found = {
        "steps": whole.step,
        "stopped": stopped,
        "curves": [[(step, found.rates) for step, found in head.curve.items()] for head in (whole, part)],
        "rates": whole.acceptance.rates,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
