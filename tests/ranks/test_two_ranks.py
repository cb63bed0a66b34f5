"""Two gloo processes hold one model. One pair of processes runs the cases of ``support/rank_cases.py`` and of
``support/rank_faults.py``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from speccompile import wrap
from speccompile.heads import DFlashHead, Eagle3Head, MtpHead, save_dflash
from speccompile.modes.eagle3.save import save_eagle3
from speccompile.modes.mtp.save import save_mtp
from support.families import model_of
from support.guide_tokenizers import EOS, common
from support.medusa import fitted_heads
from support.rank_cases import (
    BY_COINS,
    DRAWS_ALONE,
    FAMILIES,
    HEAD_IDS,
    HOT,
    MODES,
    NEW,
    PROMPTS,
    SIZES,
    VOCAB,
    all_texts,
    log_probabilities,
    rounded_spec,
    texts,
)
from support.rank_faults import SHORT
from support.tiny import greedy, tiny_llama

SMALL: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.15,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
ONE_PROCESS = {name: value for name, value in SIZES.items() if name != "rank_timeout"}
#: Of the texts that each mode writes.
KINDS = ("greedy", "alone", "mixed")


def families() -> dict[str, PreTrainedModel]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "gemma2": Gemma2ForCausalLM(Gemma2Config(**SMALL, intermediate_size=96, sliding_window=8)).eval(),
            **{name: model_of(name) for name in ("qwen3_next", "gpt_oss")},
        }


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(layers=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def one_head() -> LlamaForCausalLM:
    """Two ranks cannot share out its KV head."""
    return tiny_llama(kv_heads=1, vocab=VOCAB)


@pytest.fixture(scope="module")
def wide() -> LlamaForCausalLM:
    """A group of int8 weights is whole on one of two ranks."""
    return tiny_llama(hidden=128, vocab=VOCAB)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return families()


@pytest.fixture(scope="module")
def folder(
    target: LlamaForCausalLM,
    one_head: LlamaForCausalLM,
    wide: LlamaForCausalLM,
    models: dict[str, PreTrainedModel],
    plain: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The results of all cases, of both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    target.save_pretrained(folder / "target")
    wide.save_pretrained(folder / "wide")
    save_mtp(MtpHead.random(target, 2), target, folder / "mtp", dtype=torch.float32)
    save_dflash(dflash(target), folder / "dflash", dtype=torch.float32)
    (folder / "medusa").mkdir()
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain["greedy"], strict=True)]
    torch.save(fitted_heads(target, known, 3).state_dict(), folder / "medusa" / "medusa_lm_head.pt")
    one_head.save_pretrained(folder / "one_head")
    common().save_pretrained(folder / "one_head")
    save_eagle3(Eagle3Head.random(target, taps=(0, 1, 2)), folder / "eagle3")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tests = Path(__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])}
    both = subprocess.Popen(
        [sys.executable, "-m", "support.rank_worker", str(folder), port],
        env=os.environ | paths | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        both.wait(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(both.pid, signal.SIGKILL)
    logs = "\n".join((folder / f"log.{rank}").read_text()[-3000:] for rank in "01")
    assert (folder / "codes").is_file() and json.loads((folder / "codes").read_text()) == [0, 0], logs
    return folder


@pytest.fixture(scope="module")
def plain(target: LlamaForCausalLM) -> dict[str, Any]:
    """Of one process without drafts."""
    with wrap(target, "none", tiers=(0,), scores=True, **ONE_PROCESS) as spec:
        return all_texts(spec) | {"scored": log_probabilities(spec)}


def dflash(target: LlamaForCausalLM) -> DFlashHead:
    return DFlashHead.random(target, 3, block_size=4, num_hidden_layers=1, taps=(0, 2))


def of(folder: Path, name: str, rank: int = 0) -> Any:
    answer = json.loads((folder / f"{name}.{rank}.json").read_text())
    assert "result" in answer, answer
    return answer["result"]


def error_of(folder: Path, name: str, rank: int) -> tuple[str, float]:
    answer = json.loads((folder / f"{name}.{rank}.json").read_text())
    return answer["error"], answer["seconds"]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_write_the_text_of_one(folder: Path, plain: dict[str, Any], mode: str) -> None:
    found = of(folder, mode)
    kinds = [name for name in KINDS if name in found]
    assert {name: found[name] for name in kinds} == {name: plain[name] for name in kinds}
    assert ("alone" in found) == (mode in DRAWS_ALONE)
    # Rank 1 has followed to the end, and was equal after each run.
    assert of(folder, mode, 1) is None
    assert "2 (tensor parallel), this is 0" in found["explain"]
    assert (found["preempted"] > 0) is (mode == "pages")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_other_plans(folder: Path, models: dict[str, PreTrainedModel], name: str) -> None:
    expected = [greedy(models[name], prompt, NEW + 2 * index) for index, prompt in enumerate(PROMPTS)]
    assert of(folder, name)["greedy"] == expected


def test_a_head_reads_the_whole_embedding_and_lm_head(folder: Path, target: LlamaForCausalLM) -> None:
    embedded = dflash(target).embed(torch.tensor([HEAD_IDS]))
    for rank in (0, 1):
        found = of(folder, "head", rank)
        torch.testing.assert_close(torch.tensor(found["embedded"]), embedded)
        torch.testing.assert_close(torch.tensor(found["logits"]), target.lm_head(embedded))


def test_all_ranks_emit_and_draft_what_the_first_one_does_where_their_own_numbers_differ(
    folder: Path, plain: dict[str, Any]
) -> None:
    found = of(folder, "own_numbers")
    assert found["greedy"] == plain["greedy"]
    # The heads of rank 0 are right about these texts.
    assert found["acceptance"] > 1.5
    assert of(folder, "own_numbers", 1) is None


def test_a_rule_over_draft_probabilities_accepts_what_it_accepts_in_one_process(
    folder: Path, target: LlamaForCausalLM
) -> None:
    options = BY_COINS | ONE_PROCESS | {"draft": str(folder / "eagle3")}
    with wrap(target, "eagle3_one_model", tiers=(0, 3), **options) as spec:
        assert of(folder, "rejection")["drawn"] == texts(spec, new=20, **HOT)
        assert spec.stats.acceptance_length > 1.1
    assert of(folder, "rejection", 1) is None


def test_log_probabilities_are_those_of_one_process(folder: Path, plain: dict[str, Any]) -> None:
    for found, expected in zip(of(folder, "scored")["scored"], plain["scored"], strict=True):
        assert flat(found) == pytest.approx(flat(expected), abs=1e-4)


def test_a_pass_that_reads_the_logits_has_those_of_all_ranks(folder: Path, plain: dict[str, Any]) -> None:
    found = of(folder, "scored")
    assert found["notes"] == {
        "best_logits": f"of {VOCAB} tokens",
        "choose_from_shards": "the gathered logits are also read by amax",
    }
    assert found["greedy"] == [text[: 4 + 2 * index] for index, text in enumerate(plain["greedy"])]


def flat(values: Any) -> list[float]:
    """Numbers in nested lists; without the log-probability that the first token of a prompt does not have."""
    if isinstance(values, list | tuple):
        return [number for value in values for number in flat(value)]
    return [] if values is None else [values]


def test_weights_are_rounded_as_in_one_process(folder: Path, wide: LlamaForCausalLM) -> None:
    with rounded_spec(wide) as spec:
        assert of(folder, "rounded")["greedy"] == texts(spec)


def test_the_engine_over_two_ranks_whose_logits_differ_in_their_last_bits(folder: Path, plain: dict[str, Any]) -> None:
    found = of(folder, "engine")
    shortest = [text[:NEW] for text in plain["greedy"]]
    assert found["random tiers"] == shortest
    assert found["beside cancelled"] == [shortest[0]] * 6
    transformers, plain_decoder = found["check"]
    assert transformers.startswith("1 of 1 texts equal") and plain_decoder.startswith("1 of 1 texts equal")
    # A difference is measured in logits of all ranks.
    difference = found["difference"]
    assert difference["position"] == 7 and difference["expected"] == (difference["got"] + 1) % VOCAB
    assert 0 < difference["logit_change"] < 100
    assert found["after silence"] == [*PROMPTS[0], *shortest[0]]
    assert {name: found[name] for name in KINDS} == {name: plain[name] for name in KINDS}
    for text in (found["mixed"][0], found["mixed"][2]):
        assert re.fullmatch("([ab]{2}c){2}", common().decode(text[:-1])) and text[-1] == EOS
    assert [token in (7, 8, 10 + place) for place, token in enumerate(found["allowed"])] == [True] * 6
    assert of(folder, "engine", 1) is None


def test_the_example_runs_on_both_ranks(folder: Path, one_head: LlamaForCausalLM) -> None:
    lines = of(folder, "example").splitlines()
    ids = common()("one two three four, one two three four, one two", return_tensors="pt").input_ids
    output = one_head.generate(ids, max_new_tokens=32, do_sample=False)
    assert lines[0] == common().decode(output[0], skip_special_tokens=True).splitlines()[0]
    assert any("all_reduce" in line for line in lines)
    assert of(folder, "example", 1) == ""


def test_a_command_runs_on_both_ranks(folder: Path, one_head: LlamaForCausalLM) -> None:
    ids = common()("one two", return_tensors="pt").input_ids
    text = common().decode(one_head.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :])
    printed = of(folder, "command")
    assert printed["generate"].startswith(text) and "8 tokens in" in printed["generate"]
    # Attention is whole on both ranks, so each layer has one sum.
    tier = json.loads(printed["inspect"])["tiers"][-1]
    assert [(call["name"], call["calls"]) for call in tier["collectives"]] == [
        *(("all_reduce", 1), ("all_reduce", one_head.config.num_hidden_layers)),
        ("all_gather", 1),
    ]
    assert tier["measured"] is None
    assert of(folder, "command", 1) == {"generate": "", "inspect": ""}


def test_collectives_are_ops_of_the_graph(folder: Path) -> None:
    found = of(folder, "engine")
    rows, places, hidden, layers = 2, 4, 64, 3
    sums = 4 * rows * places * hidden
    # The embedding, and two for each decoder layer; the choice needs two integers of each place.
    assert found["collectives"] == [
        ["all_reduce", 1, sums],
        ["all_reduce", 2 * layers, 2 * layers * sums],
        ["all_gather", 1, 16 * rows * places],
    ]
    assert "torch.ops.speccompile.all_gather" in found["stage"]
    # So does a draw with a temperature alone.
    assert found["drawn collectives"] == ["all_gather", 16 * rows * places]


def test_what_needs_the_model_or_one_process_is_refused_by_name(folder: Path) -> None:
    both = {
        "tiers": "RanksDiffer",
        "passes": "RanksDiffer",
        "free_originals": "InvalidOption",
        "save_hidden_states": "InvalidOption",
        "calibration": "InvalidOption",
        "the mode": "InvalidOption",
        "KV heads": "UnsupportedModel",
        **dict.fromkeys(("save", "rebuild", "forward", "report"), "UnsupportedSharded"),
    }
    assert of(folder, "refused") == both | {"follow": "UnsupportedSharded", "processor": "InvalidOption"}
    assert of(folder, "refused", 1) == both | {"submit": "FollowerRank"}


def test_a_slow_rank_runs_the_same_tiers(folder: Path, plain: dict[str, Any]) -> None:
    found = of(folder, "slow")
    assert found["greedy"] == [text[: SHORT + 2 * index] for index, text in enumerate(plain["greedy"])]
    assert found["ran"] == of(folder, "slow", 1)["ran"] and len(set(found["ran"])) > 2


def test_another_token_on_one_rank_is_an_error_on_both(folder: Path) -> None:
    assert of(folder, "changed_token")["errors"] == dict.fromkeys(("running", "waiting", "later"), "RanksDiffer")
    assert error_of(folder, "changed_token", 1)[0] == "RanksDiffer"


def test_a_stalled_rank_is_an_error_on_both_within_the_time_out(folder: Path) -> None:
    assert of(folder, "stalled")["errors"] == dict.fromkeys(("running", "waiting", "later"), "RankLost")
    assert error_of(folder, "stalled", 1)[0] == "RankLost"


def test_a_killed_rank_is_an_error_on_the_other_at_once() -> None:
    """Each of the two while they decode, and the first one in ``wrap``; at random moments."""
    command = [sys.executable, "-m", "benchmarks.killed_ranks", "--moments", "3", "--timeout", "20", "--span", "0.5"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 moments ended with RankLost within 20 s" in done.stdout
