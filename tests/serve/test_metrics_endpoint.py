"""``/metrics``, ``/tokenize`` and ``/v1/models``."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.serving import MAX_LEN, MODEL, SLOTS, Client, tokenizer

LABELS = ("position", "status", "finished_reason", "source")


def samples(client: Client) -> dict[str, float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name
        + "".join(f",{value}" for key, value in sorted(sample.labels.items()) if key in LABELS): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_metrics_have_our_names_and_those_of_vllm(client: Client) -> None:
    before = samples(client)
    answer = client.complete("the end of the end of the", max_tokens=30)
    after = samples(client)
    found = answer["metrics"]["speculative_decoding"]
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 30
    assert grown["vllm:prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert grown["vllm:spec_decode_num_drafts_total"] == found["num_spec_steps"] > 0
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == found["num_draft_tokens"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == found["num_accepted_draft_tokens"]
    per_position = [grown[f"vllm:spec_decode_num_accepted_tokens_per_pos_total,{place}"] for place in range(3)]
    assert per_position == found["accepted_at"]
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 29
    assert grown["vllm:request_success_total,length"] == 1 and grown["speccompile_responses_total,200"] == 2
    assert grown["speccompile_emitted_tokens_total"] in (29, 30)
    read = grown["speccompile_prefill_tokens_total"]
    assert grown["vllm:iteration_tokens_total_sum"] == grown["speccompile_emitted_tokens_total"] + read
    assert grown["vllm:iteration_tokens_total_count"] == grown["speccompile_steps_total"]
    assert grown["vllm:request_prefill_kv_computed_tokens_sum"] == read
    assert grown["vllm:prompt_tokens_by_source_total,local_compute"] == read
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_every_prompt_counts_with_all_its_tokens(client: Client) -> None:
    """Also one of which all but the last token is known, and which no chunk reads."""
    before = samples(client)
    for _ in range(3):
        client.complete("the end", max_tokens=1)
    grown = {name: value - before.get(name, 0) for name, value in samples(client).items()}
    prompts = 3 * len(tokenizer()("the end")["input_ids"])
    for name in ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total", "speccompile_prompt_tokens_total"):
        assert grown[name] == grown["vllm:request_prompt_tokens_sum"] == prompts


#: What the dashboard of vLLM's repository (examples/online_serving/prometheus_grafana/grafana.json) reads.
DASHBOARD = {
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "gpu_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_per_output_token_seconds_bucket",
    "time_per_output_token_seconds_count",
    "time_per_output_token_seconds_sum",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
}


#: Further names of vLLM's own metrics (vllm/v1/metrics/loggers.py), without those of adapters.
FURTHER = {
    "cache_config_info",
    "corrupted_requests_total",
    "engine_sleep_state",
    "external_prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total",
    "inter_token_latency_seconds_bucket",
    "iteration_tokens_total_bucket",
    "kv_cache_usage_perc",
    "mm_cache_hits_total",
    "mm_cache_queries_total",
    "num_preemptions_total",
    "num_requests_waiting_by_reason",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_recomputed_total",
    "request_inference_time_seconds_bucket",
    "request_params_max_tokens_bucket",
    "request_params_n_bucket",
    "request_prefill_kv_computed_tokens_bucket",
    "request_time_per_output_token_seconds_bucket",
}


def test_the_names_of_vllm_are_complete(client: Client) -> None:
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    assert {f"vllm:{name}" for name in FURTHER} <= {sample.name for family in families for sample in family.samples}
    (cache,) = [sample for family in families for sample in family.samples if sample.name == "vllm:cache_config_info"]
    assert int(cache.labels["num_gpu_blocks"]) * int(cache.labels["block_size"]) == SLOTS * MAX_LEN


def test_every_panel_of_vllms_dashboard_has_data(client: Client) -> None:
    client.complete("ab", max_tokens=3)
    text = client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    labelled = {sample.name for family in families for sample in family.samples if sample.labels.get("model_name")}
    assert {f"vllm:{name}" for name in DASHBOARD} <= labelled
    for family in families:
        assert family.documentation and family.type in ("counter", "gauge", "histogram")


def test_requests_are_counted_when_they_end(client: Client) -> None:
    before = samples(client)
    client.complete("the end", max_tokens=5, n=2)
    client.refused("/v1/completions", {"prompt": ""})
    after = samples(client)

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before.get(f"vllm:{name}", 0)

    assert grown("request_generation_tokens_sum") == 10 and grown("request_generation_tokens_count") == 2
    assert grown("request_max_num_generation_tokens_sum") == 5 and grown("request_params_n_sum") == 2
    assert grown("request_prompt_tokens_sum") == 2 * len(tokenizer()("the end")["input_ids"])
    assert grown("request_params_max_tokens_sum") == 10 and grown("request_success_total,length") == 2
    parts = [grown(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts) and sum(parts) == pytest.approx(grown("e2e_request_latency_seconds_sum"))


def test_models(client: Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and model["max_model_len"] == MAX_LEN
    assert client.get(f"/v1/models/{MODEL}").json() == model


def test_tokenize(client: Client) -> None:
    answer = client.post("/tokenize", {"prompt": "the é", "return_token_strs": True}).json()
    ids = tokenizer()("the é")["input_ids"]
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == MAX_LEN
    assert len(answer["token_strs"]) == len(ids)
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        assert client.refused("/tokenize", body)["param"] == "prompt"
