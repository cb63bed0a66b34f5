"""The printed step of ``ngram``, K=3, over a model of two layers, and what each pass changes in it.

A change of a pass shows in these files. ``PYTHONPATH=tests python tests/passes/test_golden_step.py`` writes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.compiler import frontend
from speccompile.compiler.pipelines import step_pipeline
from speccompile.graph.printing import without_runner
from speccompile.graph.stage import Stages
from support.plans import planned
from support.tiny import tiny_llama

GOLDEN = Path(__file__).parent / "golden"
AGAIN = "if it should, run PYTHONPATH=tests python tests/passes/test_golden_step.py and commit the difference"


def stages() -> Stages:
    """The stages of the model and of the step."""
    model = tiny_llama()
    plan = planned(model, "ngram", tiers=(0, 3), max_batch=1, max_len=16, backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "steps_of_kind", lambda *_: ({}, {}))
        built = frontend.build_stages(model, plan.info, plan.config, stored=False)
    pipeline = step_pipeline(built.config, built.config.form(3))
    _, own = pipeline.run(built.model.last.graph, built.model.last)
    return built.model.followed_by(own)


def printed() -> dict[str, str]:
    """The files by name."""
    found = stages()
    diffs = [f"# {stage.name}: {stage.note}\n{stage.diff}\n" for stage in found.values() if stage.previous]
    return {"step.txt": without_runner(found.last.python).rstrip() + "\n", "stages.diff": "\n".join(diffs)}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return printed()


@pytest.mark.parametrize("name", ["step.txt", "stages.diff"])
def test_the_printed_step_is_the_one_on_record(files: dict[str, str], name: str) -> None:
    assert files[name] == (GOLDEN / name).read_text(), f"the printed step is another one; {AGAIN}"


if __name__ == "__main__":
    for file, text in printed().items():
        (GOLDEN / file).write_text(text)
