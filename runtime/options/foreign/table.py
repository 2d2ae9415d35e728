"""The options of vLLM and SGLang that people bring along. docs/coming_from.md shows this table.

An option that is not in it is unknown, like a misspelt one.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .meaning import ANYWAY, BOTH, SGLANG, VLLM, ForeignOption, Meaning, alias, nothing, refused, sets
from .structured import adapters, log_probabilities, speculation

_COMPILED = nothing("every step is a program of a fixed size, compiled before the server is ready")
_KERNELS = nothing("the kernels are chosen for the devices; see --attention, --moe-backend and --linear")
_LLGUIDANCE = nothing("structured output is always by llguidance")
_LOADING = nothing("weights are read from safetensors or an Orbax checkpoint, slice by slice into each device's shard")
_LOG = nothing("the log has one line for each finished request, without its text")
_MESSAGES = nothing("tokens are sent with the step that made them")
_ORDER = nothing("requests are admitted by priority and waiting time, and run ahead of the devices")
_TEXT_ONLY = nothing("the models read text only")
_DATA_PARALLEL = refused("start one server for each replica, behind a router (docs/fleet.md)")
_ADAPTERS = nothing("adapters are served with --adapter, --max-adapters or --adapter-root")
_ADAPTER_MEMORY = nothing("the host memory for adapters is bounded by --adapter-host-gib")
_CONFIG_JSON = refused("change config.json in the model's directory")
_GENERATION_CONFIG = refused("change generation_config.json, or send the fields with each request")
_ROUTER = refused("put an HTTP proxy in front of --openai-port")
_TOKENIZER = refused("the tokenizer is read from the model's directory; copy its files there")
_HOST_CACHE = refused("set --host-cache-gib to the host memory of the whole server for cached pages")
_DISAGGREGATED = refused("prompts and decodes run in one server; docs/fleet.md has what routers can do")
_MULTI_HOST = refused("set --coordinator HOST:PORT, --num-processes and --process-id (docs/cluster.md)")
_POOL = refused("set --memory-fraction, or --num-pages of --page-size tokens")
_WRITTEN = nothing("the checkpoint's config.json says how it is quantized")
_NO_PARSER = refused("the models are Qwen3, whose tool calls hermes and qwen3_coder parse")
_PARSED = nothing("--openai-port parses tool calls as the chat template shows them")


def _on(*names: str, to: Meaning, off: Meaning = ANYWAY, servers: str = VLLM) -> ForeignOption:
    """Returns an option that is on or off."""
    return ForeignOption(names=names, servers=servers, meaning=to, values={"false": off}, is_switch=True)


def _each(*names: str, to: Meaning, servers: str = VLLM, **values: Meaning) -> list[ForeignOption]:
    """Returns several options of the same meaning."""
    return [ForeignOption(names=(name,), servers=servers, meaning=to, values=values) for name in names]


def _one(
    *names: str,
    to: Meaning,
    servers: str = VLLM,
    short: tuple[str, ...] = (),
    values: Mapping[str, Meaning] = MappingProxyType({}),
    **more: Meaning,
) -> ForeignOption:
    """Returns an option with a value. Values that mean something else are in `values` or, if they are names, `more`."""
    return ForeignOption(names=names, servers=servers, meaning=to, short=short, values={**more, **values})


TABLE: tuple[ForeignOption, ...] = (
    # The model and its files.
    _one("model_path", to=alias("model"), servers=SGLANG),
    _one("served_model_name", to=alias("served_name"), servers=BOTH),
    _one("max_model_len", to=alias("max_context"), values={"auto": sets(max_context=0), "-1": sets(max_context=0)}),
    _one("context_length", to=alias("max_context"), servers=SGLANG),
    _on("trust_remote_code", to=nothing("no code of a checkpoint is ever run"), servers=BOTH),
    _one("code_revision", to=nothing("no code of a checkpoint is ever run")),
    ForeignOption(names=("tokenizer", "tokenizer_path"), servers=BOTH, meaning=_TOKENIZER, may_be_model=True),
    _one("tokenizer_mode", to=_TOKENIZER, servers=BOTH, auto=ANYWAY, hf=ANYWAY),
    _one("tokenizer_revision", to=refused("the tokenizer has the --revision of the model")),
    _on("skip_tokenizer_init", to=refused("a model without tokenizer.json is served for token ids"), servers=BOTH),
    _one(
        "load_format", to=refused("weights are read from safetensors or an Orbax checkpoint"), servers=BOTH,
        dummy=sets(random_weights=True), auto=ANYWAY, safetensors=ANYWAY, fastsafetensors=_LOADING,
        runai_streamer=_LOADING,
    ),
    *_each("safetensors_load_strategy", "ignore_patterns", "max_parallel_loading_workers", to=_LOADING),
    _on("use_tqdm_on_load", to=_LOADING),
    _one("download_dir", to=refused("set HF_HOME in the environment to the directory"), servers=BOTH),
    _one("hf_token", to=refused("set HF_TOKEN in the environment, or run `hf auth login`")),
    *_each("config_format", "model_impl", to=refused("the models are those of meshserve"), auto=ANYWAY, hf=ANYWAY,
           vllm=ANYWAY),
    *_each("hf_config_path", "hf_overrides", "rope_scaling", "rope_theta", to=_CONFIG_JSON),
    _one("json_model_override_args", to=_CONFIG_JSON, servers=SGLANG),
    _one("override_generation_config", to=_GENERATION_CONFIG),
    _one("preferred_sampling_params", to=_GENERATION_CONFIG, servers=SGLANG),
    _one("sampling_defaults", to=refused("allowed are model and openai"), servers=SGLANG,
         model=sets(generation_config="auto"), openai=sets(generation_config="off")),
    _one("runner", to=refused("set --task embed or --task rerank"), auto=ANYWAY, generate=sets(task="generate")),
    _one("convert", to=refused("set --task"), auto=ANYWAY, none=ANYWAY, embed=sets(task="embed")),
    _on("is_embedding", to=sets(task="embed"), servers=SGLANG),
    _on("enable_lora", to=_ADAPTERS, servers=BOTH),
    ForeignOption(names=("lora_modules",), servers=VLLM, meaning=ANYWAY, read=adapters, is_list=True,
                  about="`--adapter NAME=PATH` for each"),
    ForeignOption(names=("lora_paths",), servers=SGLANG, meaning=ANYWAY, read=adapters, is_list=True,
                  about="`--adapter NAME=PATH` for each"),
    _one("max_loras", to=alias("max_adapters")),
    _one("max_loras_per_batch", to=alias("max_adapters"), servers=SGLANG),
    _one("max_lora_rank", to=alias("max_adapter_rank"), servers=BOTH),
    _one("max_cpu_loras", to=_ADAPTER_MEMORY),
    _one("max_loaded_loras", to=_ADAPTER_MEMORY, servers=SGLANG),
    _on("fully_sharded_loras", to=nothing("each shard has its part of an adapter's matrices")),
    _one("lora_dtype", to=refused("adapters are computed in --dtype"), auto=ANYWAY),
    _one("lora_eviction_policy", to=refused("the least recently used adapter leaves the devices"), servers=SGLANG,
         lru=ANYWAY),
    _one("lora_backend", to=_KERNELS, servers=SGLANG),
    ForeignOption(names=("lora_target_modules",), servers=SGLANG, is_list=True,
                  meaning=nothing("what an adapter changes stands in its adapter_config.json")),
    *_each("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path", to=_TEXT_ONLY),
    _on("language_model_only", to=_TEXT_ONLY),
    _on("enable_multimodal", to=refused("the models read text only"), servers=SGLANG),

    # Types and quantization.
    _one(
        "quantization", short=("-q",), servers=BOTH,
        to=refused(
            "the checkpoint says how it is quantized; weights of an unquantized one are by --quantize fp8-block, "
            "fp8-channel, int4, nvfp4 or mxfp4"
        ),
        fp8=sets(quantize="fp8-block"), none=ANYWAY, awq=_WRITTEN, awq_marlin=_WRITTEN, gptq=_WRITTEN,
        gptq_marlin=_WRITTEN, w8a8_fp8=_WRITTEN, modelopt=_WRITTEN, modelopt_fp4=_WRITTEN,
        values={"compressed-tensors": _WRITTEN},
    ),
    _one(
        "kv_cache_dtype", servers=BOTH, to=refused("the KV cache has the type of --dtype, or FP8 E4M3: --kv-dtype fp8"),
        auto=sets(kv_dtype="auto"), fp8=sets(kv_dtype="fp8"), fp8_e4m3=sets(kv_dtype="fp8"),
    ),
    _on("calculate_kv_scales", to=refused("scales of the KV cache are those of the checkpoint")),

    # Devices.
    _one("tensor_parallel_size", "tp_size", to=alias("tp"), servers=BOTH, short=("-tp",)),
    _one("decode_context_parallel_size", to=alias("cp"), short=("-dcp",)),
    _one("pipeline_parallel_size", "pp_size", "pp", servers=BOTH, short=("-pp",), values={"1": ANYWAY},
         to=refused("layers are split by tensor parallelism only; raise --tp")),
    _one("data_parallel_size", "dp_size", "dp", servers=BOTH, short=("-dp",), to=_DATA_PARALLEL, values={"1": ANYWAY}),
    *_each("data_parallel_size_local", "data_parallel_rank", "data_parallel_address", "data_parallel_backend",
           "data_parallel_rpc_port", "data_parallel_start_rank", to=_DATA_PARALLEL),
    _on("enable_dp_attention", to=_DATA_PARALLEL, servers=SGLANG),
    _on("enable_expert_parallel", to=sets(expert_parallel=True), off=sets(expert_parallel=False)),
    _one("expert_parallel_size", "ep_size", "ep", servers=SGLANG, values={"1": ANYWAY},
         to=refused("set --expert-parallel: experts are split over all devices of --tp")),
    _one("nnodes", to=alias("num_processes"), servers=BOTH),
    _one("node_rank", to=alias("process_id"), servers=BOTH),
    _one("dist_init_addr", to=alias("coordinator"), servers=SGLANG),
    *_each("master_addr", "master_port", to=_MULTI_HOST),
    _on("headless", to=_MULTI_HOST),
    _one("distributed_executor_backend", to=nothing("one process serves all devices of a host")),
    _one("api_server_count", to=nothing("one process serves all callers"), short=("-asc",)),
    _on("disable_custom_all_reduce", to=sets(all_reduce="xla"), servers=BOTH),
    _on("enable_p2p_check", to=nothing("P2P sums are always tested at the start"), servers=SGLANG),
    _one("nccl_port", to=nothing("NCCL needs no port here"), servers=SGLANG),
    _one("device", to=refused("the devices are those that jax finds"), servers=BOTH, auto=ANYWAY, cuda=ANYWAY,
         tpu=ANYWAY, cpu=sets(cpu_devices=1)),
    *_each("base_gpu_id", "gpu_id_step", to=refused("set CUDA_VISIBLE_DEVICES in the environment"), servers=SGLANG),

    # Memory.
    _one("gpu_memory_utilization", to=alias("memory_fraction")),
    _one("mem_fraction_static", to=alias("memory_fraction"), servers=SGLANG),
    _one("kv_cache_memory_bytes", to=_POOL),
    _one("max_total_tokens", to=_POOL, servers=SGLANG),
    _one("block_size", to=alias("page_size")),
    _one("num_gpu_blocks_override", to=alias("num_pages")),
    _one("swap_space", to=nothing("requests that are preempted are computed again")),
    _one("kv_offloading_size", to=alias("host_cache_gib")),
    _one("kv_offloading_backend", to=nothing("--host-cache-gib has one backend")),
    _on("enable_hierarchical_cache", to=_HOST_CACHE, servers=SGLANG),
    *_each("hicache_ratio", "hicache_size", to=_HOST_CACHE, servers=SGLANG),
    _one("cpu_offload_gb", servers=BOTH, to=refused("weights stay on the devices; quantize them, or raise --tp"),
         values={"0": ANYWAY, "0.0": ANYWAY}),
    _on("enable_prefix_caching", to=sets(prefix_cache=True), off=sets(prefix_cache=False)),
    _on("disable_radix_cache", to=sets(prefix_cache=False), servers=SGLANG),
    _one("prefix_caching_hash_algo", to=nothing("pages are found by SHA-256")),
    *[_on(name, to=nothing("every server can sleep (docs/trainers.md)"), servers=servers)
      for name, servers in (("enable_sleep_mode", VLLM), ("enable_memory_saver", SGLANG))],
    _on("enforce_eager", to=_COMPILED),
    _one("compilation_config", to=_COMPILED, short=("-cc",)),
    *_each("optimization_level", "max_seq_len_to_capture", "cuda_graph_sizes", to=_COMPILED),
    *_each("cuda_graph_max_bs", to=_COMPILED, servers=SGLANG),
    *[_on(name, to=_COMPILED, servers=SGLANG)
      for name in ("disable_cuda_graph", "disable_cuda_graph_padding", "enable_torch_compile", "skip_server_warmup")],

    # Scheduling.
    _one("max_num_seqs", to=alias("max_running")),
    _one("max_running_requests", to=alias("max_running"), servers=SGLANG),
    _one("max_queued_requests", to=alias("max_waiting"), servers=SGLANG),
    _one("max_num_batched_tokens", to=alias("max_step_tokens")),
    _one("chunked_prefill_size", to=alias("max_step_tokens"), servers=SGLANG,
         values={"-1": refused("prompts longer than a step are always computed in chunks; raise --max-step-tokens")}),
    _on("enable_chunked_prefill", to=nothing("prompts longer than a step are always computed in chunks"),
        off=refused("prompts longer than a step are always computed in chunks; raise --max-step-tokens")),
    _on("enable_mixed_chunk", to=nothing("steps have decodes and chunks of prompts together"), servers=SGLANG),
    _one("num_scheduler_steps", to=alias("max_decode_steps")),
    _one("num_continuous_decode_steps", to=alias("max_decode_steps"), servers=SGLANG),
    _one("scheduling_policy", to=_ORDER),
    *_each("schedule_policy", "schedule_conservativeness", to=_ORDER, servers=SGLANG),
    _on("enable_priority_scheduling", to=_ORDER, servers=SGLANG),
    _on("async_scheduling", to=_ORDER, off=_ORDER),
    _on("disable_overlap_schedule", to=_ORDER, servers=SGLANG),
    _one("stream_interval", to=_MESSAGES, servers=BOTH),
    _one("random_seed", to=alias("seed"), servers=SGLANG),
    ForeignOption(names=("max_logprobs",), servers=VLLM, meaning=ANYWAY, read=log_probabilities,
                  about="up to 20: accepted; more: refused"),
    ForeignOption(
        names=("speculative_config",), servers=VLLM, meaning=ANYWAY, read=speculation,
        about="`--draft-tokens`, `--draft-min-match` and, for a draft model or head, `--draft-model`",
    ),
    _one("speculative_draft_model_path", to=alias("draft_model"), servers=SGLANG),
    _one("speculative_num_draft_tokens", to=alias("draft_tokens"), servers=SGLANG),
    _one(
        "speculative_algorithm", servers=SGLANG, to=refused("set --draft-tokens, and --draft-model if there is one"),
        eagle3=nothing("the files of --draft-model say what it is"),
        standalone=nothing("the files of --draft-model say what it is"),
        ngram=nothing("without --draft-model, drafts are looked up in the request's own text"),
    ),
    _one("speculative_eagle_topk", to=refused("drafts are chains: one token at each place"), servers=SGLANG,
         values={"1": ANYWAY}),
    _one("speculative_num_steps", to=nothing("--draft-tokens is the length of a draft"), servers=SGLANG),

    # Kernels.
    _one("attention_backend", to=_KERNELS, servers=BOTH),
    *_each("prefill_attention_backend", "decode_attention_backend", "sampling_backend", "moe_runner_backend",
           "moe_a2a_backend", "fp8_gemm_backend", to=_KERNELS, servers=SGLANG),
    *_each("all2all_backend", to=_KERNELS),
    *_each("guided_decoding_backend", "structured_outputs_config", to=_LLGUIDANCE),
    _one("grammar_backend", to=_LLGUIDANCE, servers=SGLANG),
    _on("disable_outlines_disk_cache", to=_LLGUIDANCE, servers=SGLANG),

    # The API and the log.
    _one("api_key", servers=BOTH,
         to=refused("callers have tokens; make one with `meshserve token NAME`, and name their file by --tokens")),
    _one("ssl_keyfile", to=alias("tls_key")),
    _one("ssl_certfile", to=alias("tls_cert")),
    *_each("ssl_ca_certs", "ssl_cert_reqs",
           to=refused("--tls-client-ca is the authority that must have signed callers' certificates")),
    *_each("root_path", "allowed_origins", "allowed_methods", "allowed_headers", "middleware", "uds", to=_ROUTER),
    _on("allow_credentials", to=_ROUTER),
    _on("enable_auto_tool_choice", to=_PARSED),
    _one("tool_call_parser", to=_NO_PARSER, servers=BOTH, hermes=_PARSED, qwen=_PARSED, qwen25=_PARSED,
         qwen3_coder=_PARSED, qwen3_xml=_PARSED),
    _one("tool_parser_plugin", to=_NO_PARSER),
    _one("reasoning_parser", servers=BOTH, to=refused("reasoning is parsed as Qwen3 writes it; allowed is qwen3"),
         qwen3=ANYWAY, deepseek_r1=nothing("reasoning is parsed as Qwen3 writes it")),
    _one("chat_template", to=refused("put it into the model's directory, as chat_template.jinja"), servers=BOTH),
    _one("chat_template_content_format", to=nothing("parts of contents are joined to text"), auto=ANYWAY,
         string=ANYWAY),
    _one("default_chat_template_kwargs", to=refused("send chat_template_kwargs with each request")),
    _on("enable_force_include_usage", to=refused("send stream_options with each request that needs its usage")),
    _on("return_tokens_as_token_ids", to=refused("send return_token_ids with each request")),
    _on("enable_prompt_tokens_details", to=nothing("the usage always has the cached tokens of the prompt")),
    _on("enable_cache_report", to=nothing("the usage always has the cached tokens of the prompt"), servers=SGLANG),
    _on("enable_request_id_headers", to=nothing("--openai-port always answers with X-Request-Id")),
    _one("response_role", to=refused("answers are by the assistant"), assistant=ANYWAY),
    _on("allow_auto_truncate", to=refused("send truncate with each request"), servers=SGLANG),
    *[_on(name, to=_LOG) for name in ("disable_log_stats", "disable_log_requests", "enable_log_requests",
                                      "disable_uvicorn_access_log")],
    *_each("uvicorn_log_level", "max_log_len", to=_LOG),
    _on("log_requests", to=_LOG, servers=SGLANG),
    *_each("log_level", "log_level_http", "log_requests_level", to=_LOG, servers=SGLANG),
    _on("enable_metrics", to=refused("metrics are served at --http-port"), servers=SGLANG),
    _one("otlp_traces_endpoint", to=refused("set --trace, and OTEL_EXPORTER_OTLP_ENDPOINT in the environment")),
    _one("kv_events_config", to=refused("set --kv-events-endpoint and --kv-events-topic"), servers=BOTH),
    _one("kv_transfer_config", to=_DISAGGREGATED),
    _one("disaggregation_mode", to=_DISAGGREGATED, servers=SGLANG, null=ANYWAY),
)  # fmt: skip

# Values of options that have the same name here. They are given as in the table.
OWN_VALUES: dict[str, dict[str, Meaning]] = {
    "dtype": {
        "float": sets(dtype="float32"),
        **dict.fromkeys(
            ("half", "float16"), refused("bfloat16 has the size of float16 and the range of float32; set bfloat16")
        ),
    },
    "task": {
        "embedding": sets(task="embed"),
        "score": sets(task="rerank"),
        **dict.fromkeys(("classify", "reward"), refused("allowed are generate, embed and rerank")),
    },
    "generation_config": {"vllm": sets(generation_config="off")},
}
