"""The options of `meshserve.LLM` with their types, for editors and type checkers.

At run time, `options.toml_file.checked_options` checks them. A test compares these types with the options.
"""

from typing import Any, Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    """The options of `ServeConfig` that have an effect without a server. It explains them."""

    revision: str
    cp: int | Literal["auto"]
    expert_parallel: bool
    cpu_devices: int
    dtype: Literal["auto", "bfloat16", "float32"]
    task: Literal["auto", "generate", "embed", "rerank"]
    strict_config: bool
    generation_config: Literal["auto", "off"]
    kv_dtype: Literal["auto", "fp8"]
    quantize: Literal["none", "fp8-block", "fp8-channel", "int4", "nvfp4", "mxfp4"]
    dequantize: Literal["auto", "always", "never"]
    fp8_head: bool
    random_weights: bool
    adapter: dict[str, str] | list[str]
    max_adapters: int | Literal["auto"]
    max_adapter_rank: int | Literal["auto"]
    adapter_host_gib: float
    max_context: int
    page_size: int
    num_pages: int
    memory_fraction: float | Literal["auto"]
    reserve_mib: int
    host_cache_gib: float
    cache_dir: str
    compile_threads: int
    stored_programs: Literal["auto", "on", "off"]
    strict: bool
    max_running: int | Literal["auto"]
    max_step_tokens: int | Literal["auto"]
    max_prefill_tokens: int | Literal["auto"]
    max_decode_steps: int | Literal["auto"]
    draft_tokens: int
    draft_model: str
    priority_seconds: float
    seed: int
    prefix_cache: bool
    attention: Literal["auto", "reference", "cuda", "portable", "tpu", "tpu_interpreted"]
    decode_layers: Literal["auto", "off", "reference", "cuda"]
    moe_backend: Literal["auto", "reference", "xla", "cuda", "portable", "tpu", "tpu_interpreted"]
    all_reduce: Literal["auto", "xla", "p2p"]
    linear: Literal["auto", "reference", "xla", "xla_fp8", "cuda_fp8", "portable"]
    logits_processors: bool
    gemm_backend: Literal["auto", "tuned", "library"]
    draft_min_match: int
    constraint_seconds: float
    constraint_memory_mib: int
    dispatch_threads: bool


class VllmOptions(TypedDict, total=False):
    """Options of vLLM's `LLM` that are accepted; docs/coming_from.md says what they mean here."""

    tensor_parallel_size: int | None
    decode_context_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    enable_expert_parallel: bool | None
    distributed_executor_backend: str | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float | None
    block_size: int | None
    num_gpu_blocks_override: int | None
    swap_space: float | None
    cpu_offload_gb: float | None
    kv_offloading_size: float | None
    kv_cache_dtype: str | None
    quantization: str | None
    load_format: str | None
    tokenizer: str | None
    tokenizer_mode: str | None
    trust_remote_code: bool | None
    enable_prefix_caching: bool | None
    enable_chunked_prefill: bool | None
    enforce_eager: bool | None
    async_scheduling: bool | None
    disable_custom_all_reduce: bool | None
    disable_log_stats: bool | None
    speculative_config: dict[str, Any] | str | None
    compilation_config: Any
    structured_outputs_config: Any
    attention_backend: str | None
    enable_lora: bool | None
    max_loras: int | None
    max_lora_rank: int | None
    max_cpu_loras: int | None
    max_logprobs: int | None
    num_scheduler_steps: int | None
    runner: str | None
    convert: str | None


class LLMOptions(EngineOptions, VllmOptions, total=False):
    """The options of `meshserve.LLM` besides `model` and `tp`."""
