"""What a build raises on a rank whose neighbour was lost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from speccompile.compiler.sharding import abandoned_on_error
from speccompile.errors import RankLost, UnsupportedModel
from speccompile.graph_capture.sharded import ShardPosition, _install
from support.errors import raises
from support.families import model_of


class Ranks:
    abandoned = False

    def abandon(self) -> None:
        self.abandoned = True


def test_a_lost_rank_is_reported_whatever_the_build_called_it() -> None:
    ranks = Ranks()
    lost = {"during": "all_reduce", "reason": "closed"}
    with raises(RankLost, **lost) as raised, abandoned_on_error(cast(Any, ranks)):
        try:
            raise RankLost(**lost)
        except RankLost as error:
            raise UnsupportedModel(model="tiny", reason="its own forward fails") from error
    assert ranks.abandoned and isinstance(raised.value.__cause__, UnsupportedModel)
    assert raised.value.fields == lost


@pytest.mark.parametrize("error", [UnsupportedModel(model="tiny", reason="odd"), RankLost(during="x", reason="y")])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    ranks = Ranks()
    with pytest.raises(type(error)) as raised, abandoned_on_error(cast(Any, ranks)):
        raise error
    assert raised.value is error and ranks.abandoned
    with pytest.raises(type(error)), abandoned_on_error(None):
        raise error


def test_experts_whose_forward_is_another_ones_are_refused_on_all_ranks_before_any_exchange() -> None:
    path = "model.layers.0.feed_forward.experts"
    module = model_of("llama4_text").get_submodule(path)
    reason = f"{path} (Llama4TextExperts) is captured by another forward, which has no sum over the ranks"
    with raises(UnsupportedModel, model="Llama4ForCausalLM", reason=reason):
        _install("Llama4ForCausalLM", path, module, "moe_tp_experts", ShardPosition("group", 2, 0), {})
