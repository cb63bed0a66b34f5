"""One model over two processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py [MODEL]"""

import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import speccompile
from speccompile import pretrained

name = sys.argv[1] if len(sys.argv) > 1 else str(pretrained.fetch_smollm2())
ranks = int(os.environ["WORLD_SIZE"])
torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))

# transformers reads this rank's part of each weight, by the plan of the model's family. SmolLM2-135M has 3 KV heads, so
# over two ranks every rank keeps all of attention.
plan = None
if AutoConfig.from_pretrained(name).num_key_value_heads % ranks:
    plan = {f"model.layers.*.self_attn.{part}_proj": "replicate" for part in "qkvo"}
config = DistributedConfig(tp_size=ranks, tp_plan=plan)
model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config).eval()
spec = speccompile.wrap(model, mode="ngram", max_len=512)  # every rank builds its own part

if spec.rank != 0:
    spec.follow()  # runs what rank 0 runs, and returns when rank 0 closes
else:
    with spec:
        tokenizer = AutoTokenizer.from_pretrained(name)
        ids = tokenizer("one two three four, one two three four, one two", return_tensors="pt").input_ids
        output = spec.generate(ids, max_new_tokens=32)
        print(tokenizer.decode(output[0], skip_special_tokens=True))
        print(f"{spec.stats.acceptance_length:.2f} tokens a target pass over {ranks} ranks")
        for call in spec.collectives():
            print(f"{call.calls:3} x {call.name} of {call.shape} in {call.caller}: {call.nbytes / 1024:.1f} KiB")
torch.distributed.destroy_process_group()
