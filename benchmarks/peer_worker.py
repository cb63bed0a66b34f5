"""Another engine in its own process, often of another environment: nothing but the standard library and the peer
is imported here.

``python benchmarks/peer_worker.py llama.cpp|openvino MODEL.gguf THREADS`` reads requests and writes answers, a line of
JSON each: ``{"ids": [...], "new": 64, "eos": [2]}`` and ``{"tokens": [...], "first_seconds": s, "seconds": s}``. The
first line that it writes says ``{"ready": VERSION}``, or ``{"missing": why}`` where the peer is not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[..., dict[str, Any]]


def main(peer: str, path: str, threads: int) -> None:
    # Whatever the peer prints goes where errors go: answers are read from what stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        generate, package = PEERS[peer](path, threads)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    answer({"ready": f"{package} {importlib.metadata.version(package)}"})
    for line in sys.stdin:
        answer(generate(**json.loads(line)))


def llama_cpp(path: str, threads: int) -> tuple[Generate, str]:
    from llama_cpp import Llama

    model = Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)

    def generate(ids: list[int], new: int, eos: list[int]) -> dict[str, Any]:
        model.reset()
        started = time.perf_counter()
        tokens: list[int] = []
        first_seconds = 0.0
        fed = ids
        while len(tokens) < new and not (tokens and tokens[-1] in eos):
            model.eval(fed)
            fed = [model.sample(temp=0.0)]
            tokens += fed
            first_seconds = first_seconds or time.perf_counter() - started
        return {"tokens": tokens, "first_seconds": first_seconds, "seconds": time.perf_counter() - started}

    return generate, "llama-cpp-python"


def openvino(path: str, threads: int) -> tuple[Generate, str]:
    import numpy
    import openvino as ov
    import openvino_genai as genai

    # float32 besides the weights, as everybody else has it.
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = genai.LLMPipeline(path, "CPU", **settings)

    def generate(ids: list[int], new: int, eos: list[int]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = new, False
        if eos:
            config.eos_token_id, config.stop_token_ids = eos[0], set(eos)
        else:
            config.ignore_eos = True
        whole = numpy.array([ids], dtype=numpy.int64)
        started = time.perf_counter()
        result = pipeline.generate(genai.TokenizedInputs(ov.Tensor(whole), ov.Tensor(numpy.ones_like(whole))), config)
        seconds = time.perf_counter() - started
        first_seconds = result.perf_metrics.get_ttft().mean / 1000
        return {"tokens": list(map(int, result.tokens[0])), "first_seconds": first_seconds, "seconds": seconds}

    return generate, "openvino-genai"


PEERS = {"llama.cpp": llama_cpp, "openvino": openvino}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
