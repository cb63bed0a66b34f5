"""Holds the head of ``heads/`` against speculators' own ``Eagle3DraftModel``: the same draft tokens after real prompts.

speculators and this project need different versions of transformers, so it runs in two environments, one after the
other; ``make_speculators_chains.py`` says how the second one is made:

    PYTHONPATH=tests:. python -m support.speculators_head_chains write FOLDER --prompts spec_bench_dev.jsonl
    PYTHONPATH=tests oracle/bin/python -m support.speculators_head_chains compare FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from support.speculators_cases import DRAFT_LEN

HEAD = "heads/smollm2-135m-instruct"
#: Most tokens of a prompt, and prompts that are asked for; longer ones are left out.
LONGEST, COUNT = 300, 36


def write(folder: Path, prompts: Path) -> None:
    """The target, the head with what speculators needs beside it, and the drafts after each prompt."""
    from benchmarks.serving import fitting_prompts
    from speccompile import pretrained, wrap
    from speccompile.heads import load_eagle3, save_eagle3
    from support.eagle3_specs import drafted
    from support.tiny import admitted

    model, tokenizer = pretrained.load("smollm2")
    model.save_pretrained(folder / "target")
    save_eagle3(load_eagle3(HEAD, model), folder / "head", embedding=True, target_name=str(folder / "target"))
    cases = []
    sizes = {"tiers": (0, DRAFT_LEN), "max_batch": 1, "max_len": LONGEST + 64}
    with wrap(model, "eagle3_one_model", draft=HEAD, backend="eager", prefix_reuse=False, **sizes) as spec:
        for _, ids in fitting_prompts(tokenizer, prompts, COUNT, LONGEST):
            request = admitted(spec.engine, ids, max_new_tokens=DRAFT_LEN + 2)
            drafts = drafted(spec, request.slot, DRAFT_LEN)[0]
            request.cancel()
            with torch.no_grad():
                result = model(torch.tensor([ids]), output_hidden_states=True)
            states = [state[0].clone() for state in result.hidden_states]
            cases.append({"text": [*ids, int(result.logits[0, -1].argmax())], "drafts": drafts, "states": states})
    torch.save(cases, folder / "cases.pt")
    print(f"{len(cases)} chains of {DRAFT_LEN} tokens are in {folder}")


def compare(folder: Path) -> int:
    """How many chains speculators drafts otherwise."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from support.make_speculators_chains import chain

    config = Eagle3SpeculatorConfig.from_pretrained(folder / "head")
    # Its flex attention, made to train, has a mask of one fixed length.
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder / "head", config=config).float().eval()
    cases = torch.load(folder / "cases.pt")
    different = 0
    for index, case in enumerate(cases):
        read = torch.cat([case["states"][each] for each in config.eagle_aux_hidden_state_layer_ids], dim=-1)
        drafts, gap = chain(head, case["text"], read)
        if drafts != case["drafts"]:
            different += 1
            print(f"prompt {index}: {drafts} by speculators, {case['drafts']} here; smallest gap of logits {gap:.2g}")
    print(f"{len(cases) - different} of {len(cases)} chains are equal")
    return different


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench's JSON lines")
    arguments = parser.parse_args()
    if arguments.what == "write":
        if arguments.prompts is None:
            parser.error("write needs --prompts")
        arguments.folder.mkdir(parents=True, exist_ok=True)
        write(arguments.folder.resolve(), arguments.prompts)
    else:
        sys.exit(bool(compare(arguments.folder.resolve())))


if __name__ == "__main__":
    main()
