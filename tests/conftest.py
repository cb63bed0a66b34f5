"""Settings for all tests, and fixtures that belong to no single file."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile import pretrained
from speccompile.compiler.layout import PREFILL_WIDTHS
from speccompile.lowering import kernels
from speccompile.lowering.kernels import Kernels
from speccompile.lowering.tier import Tier

# Modules of helpers explain a failed assertion as test files do.
pytest.register_assert_rewrite("support")

pytest_plugins = ["support.no_skips"]

# A machine with a GPU may lack it, and the tests that need a GPU do not use it.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # Machines are shared: how long an example takes says nothing about it.
    settings.register_profile("shared machine", deadline=None)
    settings.load_profile("shared machine")


#: One test or fixture of each takes half a minute or more, most of it waiting for other processes. They begin first, so
#: that no process is left with one of them when the others have ended.
LONGEST = (
    "tests/docs/test_site.py",
    "tests/ops/cpu/test_other_cpus.py",
    "tests/ops/triton/test_interpreted.py",
    "tests/ranks/test_two_ranks.py",
)


#: More combinations of what other tests have, minutes of processes, or run by ``make test-versions``, too: marked
#: ``deep``, which ``make test-deep`` runs. On a slow machine CI leaves them out.
DEEP = (
    "tests/adapters/test_adapter_heads.py::test_drafts_are_those_of_a_wrap_with_that_head",
    "tests/adapters/test_adapter_texts.py::test_sixteen_adapters_in_eight_places_that_come_and_go",
    "tests/benchmarks/",
    "tests/cli/test_cli_start.py::test_help_and_version_import_no_torch",
    "tests/cli/test_cli_start.py::test_public_names_are_imported_at_first_use",
    "tests/cli/test_serve_command.py::test_it_serves_until_a_signal_and_finishes_what_runs",
    "tests/compiler/test_builds_in_threads.py::test_eight_threads_wrap_draw_their_first_tokens_and_generate",
    "tests/compiler/test_package.py::test_compiled_code_is_brought_along",
    "tests/compiler/test_recorded_check.py",
    "tests/compiler/test_saved_drafters.py",
    "tests/compiler/test_table_cells.py",
    "tests/docs/test_examples.py::test_custom_draft_model",
    "tests/docs/test_examples.py::test_custom_pass",
    "tests/docs/test_examples.py::test_quickstart",
    "tests/docs/test_publishing.py",
    "tests/docs/test_examples.py::test_serving",
    "tests/docs/test_pages.py::test_every_block_of_a_page_runs",
    "tests/end_to_end/recurrent/test_recurrent_heads.py",
    "tests/end_to_end/recurrent/test_recurrent_options.py",
    "tests/end_to_end/recurrent/test_recurrent_reuse.py::test_a_prompt_that_goes_on_from_a_known_end_reuses_the_state",
    "tests/end_to_end/recurrent/test_recurrent_texts.py::test_two_hundred_requests",
    "tests/end_to_end/test_family_texts.py::test_compiled_by_inductor_it_is_the_same_text",
    "tests/end_to_end/test_family_variants.py",
    "tests/end_to_end/test_images.py::test_texts_of_other_families",
    "tests/end_to_end/test_smollm2.py::test_random_schemas_are_followed_and_drafts_change_nothing",
    "tests/end_to_end/test_smollm2.py::test_rounded_to_int8_it_is_captured_as_strictly",
    "tests/end_to_end/test_smollm2_head.py::test_it_drafts_where_nothing_is_quoted",
    "tests/end_to_end/test_token_exact.py::test_eos_ids_that_occur",
    "tests/end_to_end/test_token_exact.py::test_every_length_near_max_len",
    "tests/end_to_end/test_token_exact.py::test_text_is_transformers_own_at_every_static_tier",
    "tests/graph/test_printing.py::test_a_file_runs_by_itself",
    "tests/graph_capture/test_key_index.py",
    "tests/graph_capture/test_latent.py",
    "tests/graph_capture/test_rotary.py::test_other_tables_are_captured_for_any_length",
    "tests/guides/test_guides_in_steps.py::test_no_rule_emits_what_is_not_allowed",
    "tests/guides/test_guides_in_steps.py::test_the_same_texts_in_every_neighbourhood",
    "tests/hidden_states/test_saved_rows.py",
    "tests/lowering/cuda/test_cuda_bodies.py",
    "tests/lowering/cuda/test_cuda_launches.py::test_no_step_starts_more_kernels_than_the_table_says",
    "tests/lowering/test_adapters_in_torch.py::test_adapters_run_in_compiled_bodies_without_the_cpp_ops",
    "tests/lowering/test_few_launches.py",
    "tests/lowering/test_inductor.py::test_code_for_other_vectors_is_not_taken",
    "tests/lowering/test_kernel_list.py::test_the_listed_kernel_of_an_op_is_the_one_that_is_loaded",
    "tests/lowering/test_stage_ops.py::test_every_printed_stage_runs_in_a_process_of_its_own",
    "tests/modes/dflash/test_dflash_distribution.py",
    "tests/modes/dflash/test_dflash_inductor.py",
    "tests/modes/dflash/test_dflash_transformers.py",
    "tests/modes/eagle3/test_eagle3_trees.py",
    "tests/modes/eagle3/test_speculators_heads.py",
    "tests/modes/mtp/test_mtp_thinking.py::test_acceptance_changes_with_the_phase",
    "tests/modes/mtp/test_mtp_transformers.py",
    "tests/modes/network/test_draft_segments.py",
    "tests/modes/network/test_draft_tree.py",
    "tests/modes/network/test_head_store.py::test_another_process_finds_it",
    "tests/modes/network/test_heads_in_steps.py::test_after_prompts_of_any_length",
    "tests/modes/network/test_heads_in_steps.py::test_fused_and_split_draft_the_same",
    "tests/modes/network/test_heads_in_steps.py::test_step_by_step_after_a_prompt_in_chunks",
    "tests/modes/test_auto_passes_over.py",
    "tests/modes/test_trees.py",
    "tests/ops/cpu/test_other_cpus.py::test_native_ops_on",
    "tests/ops/packed_weights/test_free_originals.py::test_memory_of_five_tiers",
    "tests/ops/packed_weights/test_free_originals.py::test_one_copy_is_left",
    "tests/ops/packed_weights/test_free_originals_refused.py::test_a_failed_wrap_gives_the_weights_back",
    "tests/ops/triton/test_interpreted.py",
    "tests/ops/triton/test_lora_launches.py::test_it_compiles_without_spills",
    "tests/ops/triton/test_rounded_rows.py",
    "tests/ops/triton/test_triton_sm90.py::test_a_kernel_fits",
    "tests/passes/step/test_use_filters.py::test_few_options_build_no_other_processors_and_draw_the_same_text",
    "tests/passes/target/test_fuse_linears.py::test_a_recording_repeats_all_ops_of_a_heads_layers",
    "tests/passes/target/test_fuse_linears.py::test_other_layers_have_the_text_of_the_model",
    "tests/passes/target/test_fuse_rotary_attention.py::test_families_that_rotate_halves_are_fused",
    "tests/passes/target/test_fuse_rotary_attention.py::test_layers_without_positions_or_own_keys_stay_as_they_are",
    "tests/passes/target/test_join_weights.py::test_families_decode_as_before_with_fewer_products",
    "tests/passes/target/test_outline_ends.py::test_other_families_compute_the_same",
    "tests/ranks/test_two_ranks.py",
    "tests/report/test_regions.py::test_every_op_that_is_a_linear_has_its_part_of_a_layer",
    "tests/runtime/test_interrupts.py::test_a_program_may_end_while_a_driver_steps",
    "tests/runtime/test_late_results.py",
    "tests/runtime/test_unread_tokens.py::test_after_steps_without_drafts",
    "tests/runtime/test_unread_tokens.py::test_steps_without_drafts_do_not_run_the_head",
    "tests/sampling/test_user_processors.py",
    "tests/serve/test_lm_eval_completions.py",
    "tests/serve/test_tool_calls.py::test_calls_with_random_schemas_are_valid_and_the_same_without_drafts",
    "tests/test_quantization.py::test_a_folder_has_the_bits_of_weights_in_memory",
    "tests/tools/families/test_family_survey.py",
    "tests/tools/policy_lab/test_policy_lab.py::test_cost_does_not_lose",
    "tests/training/test_checkpoints.py",
    "tests/training/test_kinds.py",
    "tests/training/test_make_texts.py",
    "tests/training/test_online.py",
    "tests/training/test_stopped_training.py",
    "tests/training/test_train_head.py",
    "tests/training/test_two_processes.py",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Tiny tensors gain nothing from a second thread, and tests may share their cores with others.
    torch.set_num_threads(2 if item.get_closest_marker("real") else 1)
    # Random inputs and weights must not depend on the tests that ran before. No test gives a model this seed.
    torch.manual_seed(271_828)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m gpu`` imports only the files that have such tests: a machine with a GPU may lack what others import."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("pytest.mark.gpu" in file.read_text() for file in files) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(DEEP):
            item.add_marker("deep")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # What torch and transformers brought along stays; looking through it again and again takes a tenth of the time.
    gc.collect()
    gc.freeze()
    # Traces make many objects that stay: at every 5,000 it still takes a twentieth of the time to look through them.
    gc.set_threshold(50_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What test_triton_sm90.py notes of each kernel, from whatever process it ran in."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    notes = [
        str(text) for report in reports for name, text in getattr(report, "user_properties", ()) if name == "kernel"
    ]
    if notes:
        terminalreporter.section("Triton kernels on sm_90")
        for note in sorted(set(notes)):
            terminalreporter.write_line(note)


@pytest.fixture(autouse=True, scope="session")
def own_captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Captures of tiny models do not belong into the user's cache; the real model stays where it is.

    All workers of a run share one folder: what one has made the others read.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "captures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def few_prompt_widths() -> Iterator[None]:
    """Wraps of tests read prompts in two to four widths, not in seven: making those steps took half of all tests' time.

    :func:`all_prompt_widths` is for tests that are about them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.compiler.layout.PREFILL_WIDTHS", (4, 16, 64, 512))
        yield


@pytest.fixture(scope="module")
def all_prompt_widths() -> Iterator[None]:
    """The widths that users have: ``pytestmark = pytest.mark.usefixtures("all_prompt_widths")``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.compiler.layout.PREFILL_WIDTHS", PREFILL_WIDTHS)
        yield


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny Llama with random weights. ``TINY`` of the test file has its arguments of :func:`tiny_llama`."""
    from support.tiny import tiny_llama

    return tiny_llama(**getattr(request.module, "TINY", {}))


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer: shared, so leave both as they are."""
    return pretrained.load("smollm2")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps call the C++ ops, without compiled bodies around them."""
    assert kernels.load_cpu_ops("rounded") is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the executables that were run, in order, noted outside of engine and statistics."""
    names: list[str] = []
    run = Tier.run

    def noted(self: Tier) -> None:
        names.append(self.name)
        run(self)

    monkeypatch.setattr(Tier, "run", noted)
    return names
