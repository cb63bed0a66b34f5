"""Acceptance of a head over a target whose weights, or keys and values, are rounded.

``python -m benchmarks.rounded_heads HEAD --prompts FILE``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.drafters import fitting_prompts
from benchmarks.machine import describe
from benchmarks.peer_processes import KINDS, smollm2_gguf, write_rounded
from benchmarks.prompts import name_of
from speccompile import wrap
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import session
from speccompile.heads import Eagle3Head, load_eagle3
from speccompile.hidden_states import SavedHiddenStates, SaveHiddenStates
from speccompile.pretrained import load_quantized
from speccompile.sampling.draft_vocab import target_ids
from speccompile.training.acceptance import Acceptance, DraftCounts
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled import later, unrolled

DRAFT_LEN = 3
#: SmolLM2 as a file of llama.cpp, with its integers.
GGUF = "GGUF Q4_0"
#: Options of ``wrap`` by form.
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    GGUF: {},
    "int4, KV int8": {"weights": "int4", "kv": "int8"},
    "int4, head int4": {"weights": "int4", "draft_weights": "int4"},
}


@torch.no_grad()
def replayed(head: Eagle3Head, tapped: torch.Tensor, input_ids: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """Counts ``[2, K]`` of drafts from ``tapped`` ``[1, T, taps * M]`` at each token that the target has written.

    Args:
        input_ids, written: ``[1, T]``.
    """
    ids = target_ids(head.d2t) if head.d2t is not None else torch.arange(head.config.vocab_size)
    counts, rows = DraftCounts(), later(written, 1)
    for step, left in enumerate(unrolled(head, input_ids, tapped, DRAFT_LEN)):
        rows, text = rows & later(written, step + 2), later(input_ids, step + 2)
        counts.add(rows, ids[head.logits(left).argmax(-1)], text, text)
    return counts.total()


def measured(
    target: PreTrainedModel, form: str, head: Path, ids: list[torch.Tensor], new_tokens: int, max_len: int
) -> dict[str, Any]:
    """Tokens that steps have accepted, and what the head drafts over the same texts from the hidden states of the
    rounded target, and from those of ``target`` as it is."""
    module = load_eagle3(head, target)
    teacher = Teacher(target, module.config.taps)
    with tempfile.TemporaryDirectory(prefix="speccompile-rounded-") as folder, contextlib.ExitStack() as stack:
        states = SaveHiddenStates(folder, eagle3_layers_to_capture=module.config.taps)
        options: dict[str, Any] = {"tiers": (0, DRAFT_LEN), "policy": f"fixed:{DRAFT_LEN}", "max_len": max_len}
        options |= {"draft_weights": "same", "prefix_reuse": False, "save_hidden_states": states, "draft": str(head)}
        model = target
        if form == GGUF:
            file = Path(folder, "smollm2.gguf")
            write_rounded(smollm2_gguf(Path(folder)), file, KINDS["int4"])
            model, options["weights"] = load_quantized(file)
        spec = stack.enter_context(wrap(model, "eagle3_one_model", **options | FORMS[form]))
        spec.stats.reset()
        for prompt in ids:
            spec.engine.submit(prompt[0].tolist(), max_new_tokens=new_tokens).result()
        found: dict[str, Any] = {"acceptance_length": spec.stats.acceptance_length, "steps": spec.stats.row_steps}
        spec.close()
        totals = [torch.zeros(2, DRAFT_LEN, dtype=torch.int64) for _ in range(2)]
        for record in SavedHiddenStates(folder).values():
            input_ids, written = record.input_ids[None], record.loss_mask[None].bool()
            tapped = record.aux_hidden_state[None].to(target.dtype)
            for total, taps in zip(totals, (tapped, teacher.read(input_ids).tapped), strict=True):
                total += replayed(module, taps, input_ids, written)
    for name, total in zip(("rounded_states", "unrounded_states"), totals, strict=True):
        acceptance = Acceptance.of(total)
        found[name] = {"rates": acceptance.rates, "length": acceptance.length(DRAFT_LEN), "drafts": acceptance.drafts}
    return found


def table(report: dict[str, Any]) -> Table:
    shown = Table(title=f"acceptance length at K={DRAFT_LEN}", title_justify="left")
    for heading in ("target", "in steps", "replayed", "with float32 hidden states"):
        shown.add_column(heading, justify="right")
    for form, line in report.items():
        replays = (line[name]["length"] for name in ("rounded_states", "unrounded_states"))
        shown.add_row(form, *map("{:.3f}".format, (line["acceptance_length"], *replays)))
    return shown


def main(
    head: Annotated[Path, typer.Argument(help="An EAGLE-3 head of SmolLM2: a folder.")],
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    form: Annotated[list[str] | None, typer.Option(help="May repeat. All if none.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Count the drafts of a head that targets of each form accept."""
    with session():
        target, tokenizer = load("smollm2")
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        ids = [torch.tensor([own]) for _, own in fitting]
        report = {}
        chosen = form or list(FORMS)
        with count_runs("Decoding, form by form", len(chosen)) as after_run:
            for name in chosen:
                report[name] = measured(target, name, head, ids, new_tokens, max_len)
                after_run()
                if json_file is not None:
                    settings = {"head": head.name, "prompts": name_of(prompts), "count": len(ids)}
                    settings |= {"new_tokens": new_tokens, "max_len": max_len}
                    whole = {"machine": describe(), "settings": settings, "forms": report}
                    json_file.write_text(json.dumps(whole, indent=1) + "\n")
        Console().print(table(report))


if __name__ == "__main__":
    typer.run(main)
