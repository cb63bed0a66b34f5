"""It does accept: right drafts stay, the passes saved are counted from outside, and a pause costs nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.graph.printing import load_python, to_python
from speccompile.runtime.request import Request
from support.tiny import admitted, random_prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("all_prompt_widths")

VOCAB = 128
TIERS = (0, 1, 3, 7)
MAX_BATCH = 2
LAYERS = 2
PERIODS = (5, 11)


def periodic_llama(periods: tuple[int, ...]) -> LlamaForCausalLM:
    """A Llama that walks in cycles: token t is followed by the next one of its cycle, for cycles of the given lengths.

    The embeddings are orthogonal and the output layer looks for the successor's predecessor; the decoder layers
    add too little to change the choice, though they do run, KV and all. Cycle i begins at token
    ``sum(periods[:i])``.
    """
    vocab = sum(periods)
    model = tiny_llama(vocab=vocab, hidden=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, 64))
        start = 0
        for period in periods:
            for i in range(period):
                model.lm_head.weight[start + (i + 1) % period] = torch.eye(vocab, 64)[start + i]
            start += period
    return model


def wrap(model: LlamaForCausalLM, mode: str, **options: int) -> Speculator:
    """Every prompt is read: the passes that are counted here do not depend on what ran before."""
    return speccompile.wrap(
        model, mode, tiers=TIERS, max_batch=MAX_BATCH, max_len=256, backend="eager", prefix_reuse=False, **options
    )


@pytest.fixture(scope="module")
def periodic() -> tuple[LlamaForCausalLM, Speculator]:
    model = periodic_llama(PERIODS)
    return model, wrap(model, "ngram")


TINY = {"layers": LAYERS, "vocab": VOCAB}


@pytest.fixture(scope="module")
def whole_model_drafts(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "early_exit", exit_layer=LAYERS)


@pytest.fixture(scope="module")
def first_layer_drafts(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "early_exit", exit_layer=1)


def emitted_per_step(spec: Speculator, prompt: list[int], new: int) -> list[int]:
    """Decode one prompt; the number of tokens that each step emitted, prefill's one left out."""
    request = admitted(spec.engine, prompt, max_new_tokens=new)
    assert len(request.new_tokens) == 1
    counts = []
    while spec.engine.running:
        before = len(request.new_tokens)
        spec.engine.step()
        counts.append(len(request.new_tokens) - before)
    return counts


# --- n-gram on periodic text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", range(len(PERIODS)))
def test_ngram_accepts_everything_after_the_first_period(
    periodic: tuple[LlamaForCausalLM, Speculator], cycle: int
) -> None:
    model, spec = periodic
    period, first = PERIODS[cycle], sum(PERIODS[:cycle])
    assert min(PERIODS) < 7 < max(PERIODS), "a period shorter than the drafts and one longer"
    spec.set_tier(7)
    prompt = [first + i for i in range(period)]
    new = 1 + 8 * 10
    output = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, period:].tolist()
    assert output == [first + i % period for i in range(new)], "the model was to walk in a cycle"

    spec.stats.reset()
    # Prefill emits the first token of the second period, so from the first step on there is a match.
    assert emitted_per_step(spec, prompt, new) == [8] * 10
    assert spec.stats.acceptance_length == 8
    assert spec.stats.per_position == [1.0] * 7


@pytest.mark.parametrize("cycle", range(len(PERIODS)))
def test_ngram_waits_for_the_first_period(periodic: tuple[LlamaForCausalLM, Speculator], cycle: int) -> None:
    _, spec = periodic
    period, first = PERIODS[cycle], sum(PERIODS[:cycle])
    spec.set_tier(7)
    counts = emitted_per_step(spec, [first], 1 + (period - 1) + 8 * 6)
    # The prompt and the token of prefill are two places of the first period; nothing repeats until it is over.
    assert counts == [1] * (period - 1) + [8] * 6
    after_first_period = counts[period - 1 :]
    assert sum(after_first_period) / len(after_first_period) >= 7


def test_generate_reaches_acceptance_length_7(periodic: tuple[LlamaForCausalLM, Speculator]) -> None:
    """Two rows at once, through ``generate``, each in its own cycle; the last step may have less to do."""
    _, spec = periodic
    spec.set_tier(7)
    spec.stats.reset()
    longest = max(PERIODS)
    rows = [[sum(PERIODS[:cycle]) + i % period for i in range(longest)] for cycle, period in enumerate(PERIODS)]
    spec.generate(torch.tensor(rows), max_new_tokens=100)
    assert spec.stats.acceptance_length >= 7
    assert [request.acceptance_length >= 7 for request in spec.stats.requests] == [True, True]


# --- a drafter that is the target --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", TIERS)
@pytest.mark.parametrize("rest", [0, 1, 5])
def test_the_whole_model_as_drafter_is_always_right(whole_model_drafts: Speculator, draft_len: int, rest: int) -> None:
    spec = whole_model_drafts
    spec.set_tier(draft_len)
    spec.stats.reset()
    rest = min(rest, draft_len)
    full = [draft_len + 1] * 6
    # Exactly K+1 tokens a step; the last step emits what is left.
    counts = emitted_per_step(spec, random_prompt(20, seed=draft_len), 1 + sum(full) + rest)
    assert counts == full + [rest] * (rest > 0)
    assert spec.stats.accepted_tokens == spec.stats.draft_tokens == sum(counts) - len(counts)


# --- passes, counted from outside --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", TIERS)
def test_target_passes_are_the_runs_of_tiers(first_layer_drafts: Speculator, runs: list[str], draft_len: int) -> None:
    spec = first_layer_drafts
    spec.set_tier(draft_len)
    spec.stats.reset()
    spec.generate(torch.tensor([random_prompt(30, seed=1), random_prompt(30, seed=2)]), max_new_tokens=33)
    of_rows = {
        rows: runs.count(spec.engine.tiers[draft_len, rows, "greedy"].name) for rows in spec.engine.table.row_counts
    }
    of_tiers = [name for name in runs if not name.startswith("prefill")]
    of_prefill = [name for name in runs if name in [tier.name for tier in spec.prefill.values()]]
    assert len(of_tiers) + len(of_prefill) == len(runs)
    assert sum(of_rows.values()) == len(of_tiers)
    assert {rows: count for rows, count in of_rows.items() if count} == spec.stats.rows_steps
    assert len(of_tiers) == spec.stats.target_passes == spec.stats.steps == spec.stats.tier_steps[draft_len]
    assert len(of_prefill) == spec.stats.prefill_passes
    if draft_len == 0:
        assert spec.stats.target_passes == of_rows[2] == 32


def test_fewer_passes_than_tokens(periodic: tuple[LlamaForCausalLM, Speculator], runs: list[str]) -> None:
    _, spec = periodic
    spec.set_tier(7)
    spec.generate(torch.tensor([[*range(PERIODS[0])]]), max_new_tokens=1 + 8 * 8)
    assert [name for name in runs if not name.startswith("prefill")] == [spec.engine.tiers[7, 1, "greedy"].name] * 8


@pytest.mark.parametrize("draft_len", TIERS)
def test_shape_of_the_verify_node(first_layer_drafts: Speculator, draft_len: int) -> None:
    assert first_layer_drafts.engine.table.row_counts == (1, MAX_BATCH)
    for rows in (1, MAX_BATCH):
        graph = first_layer_drafts.engine.tiers[draft_len, rows, "greedy"].graph
        assert graph.values["logits"].meta["val"].shape == (rows, draft_len + 1, VOCAB)
        assert graph.values["drafts"].meta["val"].shape == (rows, draft_len)


# --- a pause -----------------------------------------------------------------------------------------------------


def drafts_of_next_step(spec: Speculator, draft_len: int, tamper: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
    """The drafts ``[1, K]`` that tier K would make now for the only row, without running it.

    Drafts of a sequential drafter live only inside the step. So the tier's own graph is printed with ``drafts`` as its
    output, and run on clones of the arena: the state, and with it the decoding that goes on, is not touched.
    ``tamper`` may change the clones.
    """
    graph = spec.engine.tiers[draft_len, 1, "greedy"].stages["greedy_accept"].graph.copy()
    graph.set_outputs(graph.values["drafts"])
    inputs = []
    for node in graph.placeholders:
        value = graph.ports[node.name].value
        if value is None:
            value = spec.arena[node.name].clone()
            tamper(node.name, value)
        inputs.append(value)
    with torch.no_grad():
        (drafts,) = load_python(to_python(graph), "<drafts>")["step"](*inputs)
    return drafts


def untouched(name: str, tensor: torch.Tensor) -> None:
    pass


def accepted_and_proposed(spec: Speculator, request: Request) -> list[tuple[int, int]]:
    """Step until ``request`` ends: draft tokens accepted and proposed in each step."""
    counts = []
    while not request.finished:
        spec.engine.step()
        counts.append((int(spec.arena["accepted"][request.slot]), int(spec.arena["proposed"][request.slot])))
    return counts


def test_drafts_after_a_pause_are_those_without_it(first_layer_drafts: Speculator) -> None:
    spec, engine = first_layer_drafts, first_layer_drafts.engine
    prompt = random_prompt(9, seed=5)

    spec.set_tier(3)
    request = admitted(engine, prompt, max_new_tokens=60)
    while len(request.new_tokens) < 11:
        engine.step()
    text = list(request.new_tokens)
    expected = drafts_of_next_step(spec, 3, untouched)
    expected_trace = accepted_and_proposed(spec, request)
    without_pause = list(request.new_tokens)

    request = admitted(engine, prompt, max_new_tokens=60)
    spec.set_tier(0)
    while len(request.new_tokens) < len(text):
        engine.step()
    # Prefill emitted one token, each step at K=0 another.
    assert request.stats.row_steps == len(text) - 1 >= 10
    assert request.new_tokens == text
    slot = request.slot
    drafts = drafts_of_next_step(spec, 3, untouched)
    assert torch.equal(drafts[0], expected[0])

    # The reading is able to show a drafter that grew cold: without the keys of the pause the drafts are others.
    def cold(name: str, tensor: torch.Tensor) -> None:
        if name == "k_0":
            tensor[slot, len(prompt) : len(prompt) + len(text) - 1] = 0

    assert not torch.equal(drafts_of_next_step(spec, 3, cold)[0], expected[0])

    spec.set_tier(3)
    trace = accepted_and_proposed(spec, request)
    assert trace == expected_trace
    assert request.new_tokens == without_pause
    # Drafts were right and wrong, so equal counts say something.
    assert {accepted for accepted, _ in trace} > {0}
