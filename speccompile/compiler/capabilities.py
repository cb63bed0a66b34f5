"""Combinations of modes, rules, backends and policies, derived from the attributes of modes and rules.

``python -m speccompile.compiler.capabilities`` prints the table of docs/modes.md. ``wrap`` calls the same functions.
"""

from __future__ import annotations

from string import ascii_lowercase

from speccompile.acceptance import RULES, Rule
from speccompile.lowering.backends import BACKENDS, backends
from speccompile.modes.base import Mode
from speccompile.modes.registry import BUILT_IN
from speccompile.policies.parse import LEARNING


def rule_refusal(mode: Mode | type[Mode], rule: Rule | type[Rule]) -> str:
    """Why drafts of ``mode`` cannot be judged by ``rule``; empty if they can."""
    if rule.needs_draft_probs and not mode.draft_probs:
        return (
            f"it needs the probabilities that drafts were drawn from, and the drafter of mode {mode.name!r} has none; "
            "use acceptance='rejection', which judges them as drafts of probability 1"
        )
    return ""


def tree_refusal(mode: Mode | type[Mode], rule: Rule | type[Rule]) -> str:
    """Why drafts of ``mode`` under ``rule`` cannot be trees; empty if they can."""
    if not mode.drafts_trees:
        return f"drafts of mode {mode.name!r} are chains"
    if isinstance(mode, Mode) and mode.drafts_chains_alone:
        return f"drafts of mode {mode.name!r} are chains: {mode.drafts_chains_alone}"
    if not rule.judges_trees:
        return f"the acceptance rule {rule.name!r} judges chains" + f": {rule.chains_alone}" * bool(rule.chains_alone)
    return ""


def target_refusal(route: str | None, recurrent: bool) -> str:
    """Why a target, by its attention's route and whether it has a recurrent state, does not verify trees; empty if it
    does."""
    if recurrent:
        return "the model keeps a recurrent state, which only follows one path"
    return "" if route == "attention" else "the model runs its own attention, which has no trees"


def backend_refusal(mode: Mode | type[Mode], backend: str) -> str:
    """Why ``mode`` does not run on any device that ``backend`` runs on; empty if it does."""
    if set(mode.devices).isdisjoint(backends()[backend].devices):
        return f"its drafter only runs on {' and '.join(mode.devices)}"
    return ""


def table() -> str:
    """Markdown with a line for each mode: what it cannot be combined with, and why."""
    reasons: list[str] = []

    def cell(reason: str) -> str:
        if not reason:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    rules, backends = list(RULES.values()), list(BACKENDS)
    head = [
        "mode",
        "drafts",
        "trees",
        "probabilities",
        *(f"`{rule.name}`" for rule in rules),
        *(f"`{b}`" for b in backends),
    ]
    lines = [head, ["---"] * len(head)]
    for mode in sorted(BUILT_IN, key=lambda mode: mode.name):
        drafting = "ready" if mode.ready else "in the step, or split" if "fused" in mode.options() else "in the step"
        judged = [cell(rule_refusal(mode, rule)) for rule in rules]
        lowered = [cell(backend_refusal(mode, backend)) for backend in backends]
        traits = ["yes" if trait else "no" for trait in (mode.drafts_trees, mode.draft_probs)]
        lines.append([f"`{mode.name}`", drafting, *traits, *judged, *lowered])
    rows = [f"| {' | '.join(line)} |" for line in lines]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    policies = (
        "Every mode can be combined with every policy: "
        f"{', '.join(f'`{name}`' for name in ('fixed', 'schedule', *LEARNING))}."
    )
    on_a_cpu = " and ".join(
        f"`{mode.name}`"
        for mode in sorted(BUILT_IN, key=lambda mode: mode.name)
        if mode.drafts_trees and "cuda" not in {*mode.devices} & {*mode.tree_devices}
    )
    trees = f"{on_a_cpu} propose trees only on a CPU."
    return "\n".join([*rows, "", *notes, "", policies, "", *_tree_table(), "", trees])


#: Targets by the route of their attention and whether they have a recurrent state.
TARGETS = {
    "attends by the attention op": ("attention", False),
    "has layers with a recurrent state": ("attention", True),
    "runs its own attention": ("eager", False),
}


def _tree_table() -> list[str]:
    """Lines of Markdown: the rules that judge trees of each mode, by requests that are greedy and that sample; and the
    targets that verify them."""
    reasons: list[str] = []

    def cell(reason: str, yes: str) -> str:
        if not reason:
            return yes
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({ascii_lowercase[reasons.index(reason)]})"

    rules = list(RULES.values())
    lines = [["trees of mode", *(f"`{rule.name}`" for rule in rules)]]
    lines.append(["---"] * len(lines[0]))
    for mode in sorted(BUILT_IN, key=lambda mode: mode.name):
        judged = [
            cell(tree_refusal(mode, rule) or rule_refusal(mode, rule), "greedy" if rule.greedy_only else "all")
            for rule in rules
        ]
        lines.append([f"`{mode.name}`", *judged])
    targets = [["target", "chains", "trees"], ["---"] * 3]
    targets += [[name, "all", cell(target_refusal(*kind), "all")] for name, kind in TARGETS.items()]
    notes = [f"- {letter}: {reason}" for letter, reason in zip(ascii_lowercase, reasons, strict=False)]
    rows, kinds = ([f"| {' | '.join(line)} |" for line in part] for part in (lines, targets))
    requests = "`all` are greedy requests and requests that sample, `greedy` are greedy requests only:"
    return [f"Trees by every rule; {requests}", "", *rows, "", *kinds, "", *notes]


if __name__ == "__main__":
    print(table())
