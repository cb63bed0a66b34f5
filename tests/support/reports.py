"""A report of a tiny model, made once for all tests that look at it."""

from __future__ import annotations

import functools
from dataclasses import replace

import speccompile
from speccompile import Tree
from speccompile.report.data import Report, TierReport
from speccompile.report.program_data import Node, Program
from support.tiny import tiny_llama

TREE = Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
#: A lookup drafts of it.
PROMPT = [5, 6, 7, 8, 9] * 4


@functools.cache
def tiny_report() -> Report:
    """Of chains, measured and decoded."""
    with speccompile.wrap(tiny_llama(), mode="ngram", tiers=(0, 1, 3), max_len=64, backend="eager") as spec:
        return spec.report(prompts=[PROMPT, PROMPT[:7]], max_new_tokens=16)


@functools.cache
def tree_report() -> Report:
    """Of a tree."""
    with speccompile.wrap(tiny_llama(), mode="suffix", tiers=(0, TREE), max_len=64, backend="eager") as spec:
        return spec.report(prompts=[PROMPT], max_new_tokens=8)


def with_layers(report: Report, count: int) -> Report:
    """The report as if the model had ``count`` layers: its second layer again and again."""
    tiers = tuple(_tier(tier, count) for tier in report.tiers)
    subject = replace(report.subject, layers=count)
    return replace(report, subject=subject, model=_program(report.model, count), tiers=tiers)


def _tier(tier: TierReport, count: int) -> TierReport:
    bodies = tuple(replace(body, layers=tuple(range(count))) for body in tier.bodies)
    return replace(tier, program=_program(tier.program, count), bodies=bodies)


def _program(program: Program, count: int) -> Program:
    nodes: list[Node] = []
    for node in program.nodes:
        nodes.append(node)
        if node.layer == 1:
            nodes += [
                replace(node, name=f"{node.name}_of_{layer}", layer=layer, inputs=(nodes[-1].name, *node.inputs))
                for layer in range(2, count)
            ]
    return replace(program, nodes=tuple(replace(node, place=place) for place, node in enumerate(nodes)))
