"""Hidden states that are saved on a GPU are those that transformers computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speccompile.hidden_states import SavedHiddenStates, SaveHiddenStates
from support.gpu_texts import NEW, PROMPTS, own_texts, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

LAYERS = (0, 1)


def test_saved_rows(tmp_path: Path) -> None:
    plain, wanted = tiny_llama(layers=3), own_texts(tiny_llama(layers=3))
    saves = SaveHiddenStates(tmp_path, write_interval=2, eagle3_layers_to_capture=LAYERS)
    options = {"exit_layer": 2, "save_hidden_states": saves}
    with wrapped(tiny_llama(layers=3).cuda(), "early_exit", **options) as spec:
        for tier in (0, 3):
            spec.set_tier(tier)
            requests = [
                spec.engine.submit(prompt, max_new_tokens=NEW, eos_token_id=[], record=f"{tier} {index}")
                for index, prompt in enumerate(PROMPTS)
            ]
            assert [request.result().token_ids for request in requests] == wanted
        spec.hidden_states.flush()
        assert spec.stats.accepted_tokens > 0
        records = SavedHiddenStates(tmp_path)
        for tier in (0, 3):
            for index, (prompt, text) in enumerate(zip(PROMPTS, wanted, strict=True)):
                record = records[f"{tier} {index}"]
                assert record.input_ids.tolist() == (prompt + text)[:-1]
                with torch.no_grad():
                    states = plain(record.input_ids[None], output_hidden_states=True).hidden_states
                close(record.hidden_state, states[-1][0])
                close(record.aux_hidden_state, torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
