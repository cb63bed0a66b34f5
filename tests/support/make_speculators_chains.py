"""Writes ``speculators_chains.json``: what speculators saves of its heads, and what its ``Eagle3DraftModel`` drafts.

speculators and this project need different versions of transformers, so this runs in its own environment:

    python -m venv oracle
    oracle/bin/pip install speculators==0.9.0 transformers==5.19.0
    PYTHONPATH=tests oracle/bin/python -m support.make_speculators_chains [--chains 12]

The tests write the same configs and tensors, load them, and compare the drafts of a wrapped model with these chains.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig, LlamaForCausalLM

from support.speculators_cases import CASES, DRAFT_LEN, LAYERS, SIZES, head_tensors, target

FILE = Path(__file__).with_name("speculators_chains.json")
#: A text with a choice between logits closer than this is left out: other machines could choose otherwise.
LEAST_GAP = 1e-4
LONGEST = 40


def head_of(kind: str, layer: dict[str, Any], fields: dict[str, Any]) -> Eagle3DraftModel:
    """With the weights that the tests draw too."""
    inner = AutoConfig.for_model(kind, **(SIZES | layer))
    inner._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=DRAFT_LEN)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **({"draft_vocab_size": 40} | fields),
    )
    head = Eagle3DraftModel(config).eval()
    ignored = ("verifier_norm.weight", "verifier_lm_head.weight")
    shapes = {name: tuple(value.shape) for name, value in head.state_dict().items() if name not in ignored}
    missing, unexpected = head.load_state_dict(head_tensors(shapes), strict=False)
    assert set(missing) <= set(ignored) and not unexpected, (missing, unexpected)
    return head


def saved(head: Eagle3DraftModel) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """config.json, and shapes and dtypes of the tensors."""
    with tempfile.TemporaryDirectory() as folder:
        head.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    kinds = {name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in tensors.items()}
    return config, dict(sorted(kinds.items()))


def states_of(model: LlamaForCausalLM, text: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each layer reads, ``[n, M]``, after these the last layer's output; and the last logits."""
    last: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        result = model(torch.tensor([text]), output_hidden_states=True)
    hook.remove()
    # transformers' own last state is after the final norm.
    return [state[0] for state in result.hidden_states[:LAYERS]] + [last[0].view(len(text), -1)], result.logits[0, -1]


def chain(head: Eagle3DraftModel, text: Sequence[int], states: torch.Tensor) -> tuple[list[int], float]:
    """The target's ids of a chain of draft tokens, and the smallest gap between the best two logits.

    ``states`` ``[n, taps * M]`` belong to all tokens of ``text`` but the last. The model is made to train: step t of a
    row reads the token t places further on, so the drafts so far are put after the text.
    """
    rows = len(text) - 1
    drafts: list[int] = []
    gaps = []
    # Rows after the text's own hold nothing; no other row attends to them.
    hidden = torch.cat([states, torch.zeros(DRAFT_LEN, states.shape[1])])[None]
    documents = torch.zeros(1, rows + DRAFT_LEN, dtype=torch.long)
    for place in range(DRAFT_LEN):
        tokens = torch.tensor([[*text[1:], *drafts, *[0] * (DRAFT_LEN - place)]])
        logits: list[torch.Tensor] = []
        hook = head.lm_head.register_forward_hook(lambda _m, _i, output, kept=logits: kept.append(output))
        with torch.no_grad():
            chosen = head(hidden, tokens, documents, ttt_steps=place + 1)[place][0, rows - 1]
        hook.remove()
        drafts.append(int(chosen) + (0 if head.d2t is None else int(head.d2t[chosen])))
        best = logits[place][0, rows - 1].topk(2).values
        gaps.append(float(best[0] - best[1]))
    return drafts, min(gaps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chains", type=int, default=12)
    count = parser.parse_args().chains
    model = target()
    heads = {name: head_of(*case) for name, case in CASES.items()}
    prompts: list[list[int]] = []
    chains: dict[str, list[list[int]]] = {name: [] for name in CASES}
    seed = 0
    while len(prompts) < count:
        generator = torch.Generator().manual_seed(seed)
        seed += 1
        length = int(torch.randint(2, LONGEST, (1,), generator=generator))
        prompt = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        states, logits = states_of(model, prompt)
        best = logits.topk(2).values
        found, gaps = {}, [float(best[0] - best[1])]
        for name, head in heads.items():
            ids = head.config.eagle_aux_hidden_state_layer_ids or [2, LAYERS // 2, LAYERS - 3]
            read = torch.cat([states[each] for each in sorted(ids)], dim=-1)
            found[name], gap = chain(head, [*prompt, int(logits.argmax())], read)
            gaps.append(gap)
        if min(gaps) < LEAST_GAP:
            continue
        prompts.append(prompt)
        for name, drafts in found.items():
            chains[name].append(drafts)
    cases = {}
    for name, head in heads.items():
        config, tensors = saved(head)
        cases[name] = {"config": config, "tensors": tensors, "chains": chains[name]}
    versions = {name: version(name) for name in ("speculators", "transformers", "torch")}
    FILE.write_text(_lines({"versions": versions, "prompts": prompts, "cases": cases}) + "\n")
    print(f"{len(cases)} heads, {count} chains each, by {versions}")


def _lines(value: Any, depth: int = 0) -> str:
    """JSON in which a config, a tensor's kind, a prompt and a chain are one line each."""
    if depth == 4 or not isinstance(value, dict | list) or all(isinstance(item, int) for item in value):
        return json.dumps(value)
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    shown = [f"{'' if key is None else f'{json.dumps(key)}: '}{_lines(item, depth + 1)}" for key, item in items]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    pad = " " * depth
    return f"{opened}\n" + ",\n".join(f"{pad} {line}" for line in shown) + f"\n{pad}{closed}"


if __name__ == "__main__":
    main()
