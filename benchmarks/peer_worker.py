"""Another engine in its own process, often of another environment: nothing but the standard library and the peer
is imported here.

``python benchmarks/peer_worker.py llama.cpp|openvino MODEL.gguf THREADS DRAFT_LEN MAX_LEN KV`` reads requests and
writes answers, a line of JSON each: ``{"ids": [...], "new": 64, "eos": [2]}`` and ``{"tokens": [...], "first_seconds":
s, "seconds": s, "passes": n}``; passes leave out the one over the prompt, and are 0 where they are not known. The first
line that it writes says ``{"ready": VERSION}``, or ``{"missing": why}`` where the peer is not installed.

With a DRAFT_LEN it decodes with its own prompt lookup. KV is the form of its keys and values, or empty.
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
#: Longest n-gram that lookups match.
NGRAM = 3


def main(peer: str, path: str, threads: int, draft_len: int, max_len: int, kv: str) -> None:
    # Whatever the peer prints goes where errors go: answers are read from what stdout was.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        generate, package = PEERS[peer](path, threads, draft_len, max_len, kv)
    except ImportError as error:
        answer({"missing": str(error)})
        return
    answer({"ready": f"{package} {importlib.metadata.version(package)}"})
    for line in sys.stdin:
        answer(generate(**json.loads(line)))


def llama_cpp(path: str, threads: int, draft_len: int, max_len: int, kv: str) -> tuple[Generate, str]:
    from llama_cpp import GGML_TYPE_Q8_0, Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(max_ngram_size=NGRAM, num_pred_tokens=draft_len) if draft_len else None
    model = Llama(
        path,
        n_ctx=max_len + draft_len + 1,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        draft_model=lookup,
        # Its buffer for the logits of drafts is too small otherwise.
        logits_all=lookup is not None,
        # Values in 8 bits need it.
        **({"type_k": GGML_TYPE_Q8_0, "type_v": GGML_TYPE_Q8_0, "flash_attn": True} if kv else {}),
        verbose=False,
    )

    evaluate, passes = model.eval, []

    def counted(tokens: list[int]) -> None:
        passes.append(len(tokens))
        evaluate(tokens)

    model.eval = counted

    def generate(ids: list[int], new: int, eos: list[int]) -> dict[str, Any]:
        model.reset()
        started = time.perf_counter()
        tokens: list[int] = []
        first_seconds = 0.0
        passes.clear()
        # It samples greedily at temperature 0.
        for token in model.generate(ids, temp=0.0):
            first_seconds = first_seconds or time.perf_counter() - started
            tokens.append(int(token))
            if len(tokens) == new or token in eos:
                break
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "first_seconds": first_seconds, "seconds": seconds, "passes": len(passes) - 1}

    return generate, "llama-cpp-python"


def openvino(path: str, threads: int, draft_len: int, max_len: int, kv: str) -> tuple[Generate, str]:
    import numpy
    import openvino as ov
    import openvino_genai as genai

    # As it schedules a single request, but each prompt is read: no other engine here reuses the KV of an earlier one.
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.max_num_batched_tokens = False, max_len
    # float32 besides the weights, as everybody else has it.
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "scheduler_config": scheduler}
    if draft_len:
        settings["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(path, "CPU", **settings)

    def generate(ids: list[int], new: int, eos: list[int]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = new, False
        if draft_len:
            config.num_assistant_tokens, config.max_ngram_size = draft_len, NGRAM
        if eos:
            config.eos_token_id, config.stop_token_ids = eos[0], set(eos)
        else:
            config.ignore_eos = True
        whole = numpy.array([ids], dtype=numpy.int64)
        started = time.perf_counter()
        result = pipeline.generate(genai.TokenizedInputs(ov.Tensor(whole), ov.Tensor(numpy.ones_like(whole))), config)
        seconds = time.perf_counter() - started
        first_seconds = result.perf_metrics.get_ttft().mean / 1000
        tokens = list(map(int, result.tokens[0]))
        # With lookups it does not report how many passes there were.
        passes = 0 if draft_len else len(tokens) - 1
        return {"tokens": tokens, "first_seconds": first_seconds, "seconds": seconds, "passes": passes}

    return generate, "openvino-genai"


PEERS = {"llama.cpp": llama_cpp, "openvino": openvino}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
