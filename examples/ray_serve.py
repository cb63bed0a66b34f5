"""Two replicas of one server under Ray Serve: python examples/ray_serve.py

Needs pip install 'speccompile[serve,ray]'. The address is http://127.0.0.1:8000, as that of `speccompile serve`.
"""

from __future__ import annotations

import sys

import ray
from ray import serve

from speccompile import pretrained, wrap
from speccompile.serve.options import ServeOptions
from speccompile.serve.replicas.ray_serve import ray_app
from speccompile.serve.service import Service

MODEL = "smollm2"  # or a folder that all machines have, or a hub id


def make_service() -> Service:
    """Runs in each replica."""
    model, tokenizer = pretrained.load(MODEL)
    spec = wrap(model, "suffix", max_batch=4, max_len=2048, max_waiting=60, scores=True)
    return Service(spec, tokenizer, MODEL, ServeOptions())


def main(replicas: int = 2) -> None:
    ray.init()
    # On a GPU: ray_actor_options={"num_gpus": 1}. Instead of a number: autoscaling_config={"min_replicas": 1, ...}.
    app = ray_app(make_service, threads=1, num_replicas=replicas, ray_actor_options={"num_cpus": 1})
    serve.run(app, name="speccompile", blocking=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
