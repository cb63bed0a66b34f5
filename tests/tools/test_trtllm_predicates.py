"""TensorRT-LLM's predicates of modes: ours are the same, save where they are meant to be others."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.tools.trtllm_predicates import DIFFERENCES, MODES, PREDICATES, built_in, holds, table

DOCS = Path(__file__).parents[2] / "docs" / "modes.md"

ONE_MODEL = {"mtp", "mtp_eagle_one_model", "eagle3_one_model"}
TWO_MODELS = {"mtp_eagle", "eagle3"}
DRAFTER = TWO_MODELS | {"draft_target", "ngram", "user_provided", "save_hidden_states"}

#: Of which modes each predicate holds in TensorRT-LLM (tensorrt_llm/_torch/speculative/interface.py of November 2025);
#: the last two with the arguments that PREDICATES names.
TRTLLM: dict[str, set[str]] = {
    "is_mtp_one_model": {"mtp", "mtp_eagle_one_model"},
    "is_mtp_eagle_one_model": {"mtp_eagle_one_model"},
    "is_mtp_vanilla": {"mtp"},
    "is_mtp_eagle": {"mtp_eagle"},
    "is_eagle3": {"eagle3"},
    "is_eagle3_one_model": {"eagle3_one_model"},
    "is_ngram": {"ngram"},
    "is_user_provided": {"user_provided"},
    "is_none": {"none"},
    "is_draft_target": {"draft_target"},
    "is_save_hidden_states": {"save_hidden_states"},
    "use_one_engine": ONE_MODEL,
    "without_logits": ONE_MODEL,
    "needs_kv_cache_rewind": ONE_MODEL | {"ngram"},
    "support_overlap_scheduler": ONE_MODEL | TWO_MODELS | {"draft_target"},
    "support_guided_decoder": DRAFTER | {"none"},
    "support_capturable_guided_decoder": ONE_MODEL,
    "has_draft_model": TWO_MODELS | {"draft_target"},
    "needs_kv_cache_recompute": TWO_MODELS,
    "need_load_draft_weights": {"eagle3_one_model"},
    "has_spec_decoder": ONE_MODEL | TWO_MODELS,
    "has_spec_drafter": DRAFTER,
    "extend_ctx": DRAFTER | {"none", "auto"},
    "attention_need_spec_dec_mode": {"eagle3_one_model"},
}


def test_all_eleven_and_all_predicates() -> None:
    assert len(MODES) == 11 and PREDICATES.keys() == TRTLLM.keys()
    assert built_in().keys() == MODES.keys()


@pytest.mark.parametrize("predicate", TRTLLM)
def test_the_same_save_where_meant_otherwise(predicate: str) -> None:
    ours = {name for name, mode in built_in().items() if holds(predicate, mode)}
    meant = {name for difference in DIFFERENCES if difference.predicate == predicate for name in difference.modes}
    assert ours ^ TRTLLM[predicate] == meant


def test_differences_say_why() -> None:
    assert all(difference.reason and difference.modes <= MODES.keys() for difference in DIFFERENCES)
    assert {difference.predicate for difference in DIFFERENCES} <= PREDICATES.keys()


def test_the_docs_table_is_what_the_code_says() -> None:
    inside = DOCS.read_text().split("<!-- trtllm -->")[1].split("<!-- end of trtllm -->")[0]
    assert inside.strip() == table(), "run python -m speccompile.tools.trtllm_predicates and put it into docs/modes.md"
