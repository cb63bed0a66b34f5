"""The perplexity of llama.cpp's own quantisations, in a process of the peers' environment: nothing but the standard
library, NumPy and llama_cpp is imported here.

``python benchmarks/perplexity_worker.py SOURCE.gguf FOLDER THREADS`` reads one JSON object, ``{"ids": [...], "window":
512, "kinds": ["Q4_0", ...]}``, and writes one: by kind what :func:`measure` returns, or ``{"missing": why}``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(source: str, folder: str, threads: int) -> None:
    # What the library prints goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        import llama_cpp
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=answers, flush=True)
        return
    found = {"version": llama_cpp.__version__}
    for kind in request["kinds"]:
        path = source if kind == "F32" else quantise(source, os.path.join(folder, f"{kind}.gguf"), kind, threads)
        found[kind] = measure(path, request["ids"], request["window"], threads)
    print(json.dumps(found), file=answers, flush=True)


def quantise(source: str, target: str, kind: str, threads: int) -> str:
    """Write ``source`` as llama.cpp's file type ``kind``."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = threads
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {kind}")
    return target


def measure(path: str, ids: list[int], window: int, threads: int) -> dict[str, Any]:
    """The mean negative log-likelihood of a token over windows, as ``speccompile measure-weights`` cuts them, and the
    bytes of the file."""
    import numpy
    from llama_cpp import Llama

    model = Llama(
        path, n_ctx=window, n_batch=window, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )
    losses = []
    for start in range(0, len(ids) - window, window):
        piece = ids[start : start + window + 1]
        model.reset()
        model.eval(piece[:-1])
        logits = numpy.asarray(model.scores[:window], dtype=numpy.float64)
        logits -= logits.max(1, keepdims=True)
        chosen = logits[numpy.arange(window), piece[1:]]
        losses.append(float((numpy.log(numpy.exp(logits).sum(1)) - chosen).mean()))
    return {"loss": sum(losses) / len(losses), "bytes": os.path.getsize(path)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
