"""The options of a server. Each is written once, in `ServeConfig`; flags, TOML keys and help follow from it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..api.tasks import TASKS
from ..model_files.quantization import SCHEMES
from .combinations import check_combinations
from .option import Option, option

_ADAPTER_SLOTS = 8
_MIN_FAIL_SECONDS = 1.0  # with a shorter time, a busy machine could be mistaken for a lost one

_MODEL, _MEMORY, _SCHEDULING, _KERNELS = "model and devices", "memory and compilation", "scheduling", "kernels"
_LISTENING, _OBSERVABILITY, _CLUSTER = "listening and security", "observability", "several processes"

# The sections of the help text, in order.
SECTIONS = (_MODEL, _MEMORY, _SCHEDULING, _KERNELS, _LISTENING, _OBSERVABILITY, _CLUSTER)


def _listening(default: Any, help: str, **rest: Any) -> Any:
    return option(default, _LISTENING, help, is_server_only=True, may_differ=True, **rest)


def _observability(default: Any, help: str, **rest: Any) -> Any:
    return option(default, _OBSERVABILITY, help, is_server_only=True, may_differ=True, **rest)


def _cluster(default: Any, help: str, **rest: Any) -> Any:
    return option(default, _CLUSTER, help, is_server_only=True, **rest)


def options() -> dict[str, Option]:
    """Returns every option by name, in the order of `ServeConfig`."""
    return {each.name: each.metadata["option"] for each in dataclasses.fields(ServeConfig)}


def server_only_options() -> frozenset[str]:
    """Returns the names of the options that have no effect without a server."""
    return frozenset(name for name, each in options().items() if each.is_server_only)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of a server. The defaults suit the devices of the machine.

    To add an option, add a field here. Its flag, TOML key, checks and help text follow from the field.

    Raises:
      ConfigError: A value is out of range, or options contradict each other.
    """

    model: str = option(
        "",
        _MODEL,
        "model directory in Hugging Face or Orbax form, local or at gs:// or s3://; a Hugging Face id such as "
        "Qwen/Qwen3-8B, which huggingface_hub downloads into its cache; or 'demo', the embedded model",
        may_differ=True,
    )
    revision: str = option(
        "",
        _MODEL,
        "branch, tag or commit of a model given by its Hugging Face id; empty is its default branch",
        may_differ=True,
    )
    tp: int = option(
        0,
        _MODEL,
        "tensor-parallel size: over how many devices each layer is split; auto is the size that decodes a single "
        "request fastest, by the roofline of the machine's devices, 1 on CPUs, and all devices of several processes",
        least=1,
        is_auto=True,
    )
    cp: int = option(
        1,
        _MODEL,
        "context-parallel size, where tp exceeds the model's KV heads: number of devices that divide the pages of a KV "
        "head instead of repeating it, so that the cache holds cp times as many tokens; auto is as many as possible",
        least=1,
        is_auto=True,
    )
    expert_parallel: bool = option(
        False,
        _MODEL,
        "split a mixture of experts by expert: each device has whole experts instead of slices of all",
    )
    cpu_devices: int = option(
        0, _MODEL, "number of virtual CPU devices to serve on; 0 uses the accelerators of the machine", least=0
    )
    dtype: str = option(
        "auto",
        _MODEL,
        "type of weights, activations and KV cache; auto is bfloat16, or float32 for float32 checkpoints and on CPUs",
        choices=("auto", "bfloat16", "float32"),
    )
    task: str = option(
        "auto",
        _MODEL,
        "what the model does: generate text, embed texts (Embed), or rerank documents (Rerank, Score); auto is embed "
        "if the model's modules.json describes an embedding model, else generate",
        choices=("auto", *TASKS),
    )
    strict_config: bool = option(
        False,
        _MODEL,
        "refuse a model whose config.json has keys that meshserve does not know, or lacks keys whose defaults it would "
        "have to assume; without, the log names them",
    )
    generation_config: str = option(
        "auto",
        _MODEL,
        "sampling defaults; auto takes temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens from "
        "the model's generation_config.json, off ignores them",
        choices=("auto", "off"),
    )
    kv_dtype: str = option(
        "auto",
        _MODEL,
        "type of the KV cache; auto is the activations'; fp8 (e4m3) holds twice as many tokens as bfloat16",
        choices=("auto", "fp8"),
    )
    quantize: str = option(
        "none",
        _MODEL,
        "quantize the weights of an unquantized model while they are loaded: fp8-block (128 x 128 weights share a "
        "scale), fp8-channel (rows), int4 (groups of 128), or 4-bit floats: nvfp4 (groups of 16) or mxfp4 (of 32)",
        choices=("none", *SCHEMES),
    )
    dequantize: str = option(
        "auto",
        _MODEL,
        "dequantize the layers' weights to the activations' type while they are loaded; auto does so on GPUs where a "
        "layer takes up to 32 MiB in bfloat16 (Qwen3-0.6B): decode steps are not faster with fewer bytes there",
        choices=("auto", "always", "never"),
    )
    fp8_head: bool = option(
        False, _MODEL, "quantize the output head to FP8 while it is loaded; of a tied embedding, an FP8 copy is made"
    )
    random_weights: bool = option(
        False,
        _MODEL,
        "use random weights, for measurements; --model may then be a published size such as qwen3-8b",
    )
    served_name: str = option(
        "",
        _MODEL,
        "model name that callers see; empty is the Hugging Face id as it is given, or the name of the model directory",
        is_server_only=True,
        may_differ=True,
    )
    adapter: tuple[str, ...] = option(
        (),
        _MODEL,
        "NAME=PATH: serve the adapter (LoRA) in this directory, as PEFT saves it, or of this Hugging Face id, to "
        "requests that name it; may be given several times. In TOML a table, [adapter], of NAME = PATH",
        is_list=True,
    )
    max_adapters: int = option(
        0,
        _MODEL,
        "number of adapters on the devices at the same time; host memory holds the others, and the least recently used "
        "one leaves first; auto is 8 if `adapter` or `adapter_root` is given, else none",
        least=1,
        most=256,
        is_auto=True,
    )
    max_adapter_rank: int = option(
        0,
        _MODEL,
        "largest rank of an adapter, for which memory is set aside per slot; auto is that of `adapter`, at least 16",
        least=1,
        most=256,
        is_auto=True,
    )
    adapter_host_gib: float = option(4.0, _MODEL, "host memory in GiB for adapters", least=0)
    max_context: int = option(
        0,
        _MODEL,
        "maximum number of prompt and output tokens of a request; 0 uses the model's limit, at most 32768",
        least=0,
    )
    page_size: int = option(32, _MEMORY, "tokens per KV cache page", least=1)
    num_pages: int = option(
        0, _MEMORY, "KV cache pages on each device; 0 fills the share of memory given by memory_fraction", least=0
    )
    memory_fraction: float = option(
        0.0,
        _MEMORY,
        "share of each device's memory for weights, KV cache and scratch memory; auto is 0.92 of a GPU, and 0.85 of "
        "what other devices report",
        least=0.01,
        most=1,
        is_auto=True,
    )
    reserve_mib: int = option(
        512, _MEMORY, "device memory in MiB to leave free beside weights, KV cache and scratch memory", least=0
    )
    host_cache_gib: float = option(
        0.0,
        _MEMORY,
        "host memory in GiB in which each process keeps cached pages that its devices have no room for; prompts that "
        "begin with them are restored instead of computed where that is faster; 0 keeps none",
        least=0,
    )
    host_cache_dir: str = option(
        "",
        _MEMORY,
        "directory in which the pages of host_cache_gib and of the devices are kept when the server stops, and from "
        "which it takes them when it starts again; empty keeps none. Only this server may use it",
        is_server_only=True,
    )
    cache_dir: str = option(
        "~/.cache/meshserve",
        _MEMORY,
        "directory in which compiled programs are kept between starts; empty keeps none",
        may_differ=True,
    )
    compile_threads: int = option(
        0,
        _MEMORY,
        "programs compiled at the same time; 0 uses one thread per CPU core, at most 8",
        least=0,
        may_differ=True,
    )
    stored_programs: str = option(
        "auto",
        _MEMORY,
        "load the compiled programs of cache_dir without tracing them; auto does so on CPUs, on also on GPUs and TPUs, "
        "where it has not been tried, and off leaves them to jax's cache",
        choices=("auto", "on", "off"),
        may_differ=True,
        is_expert=True,
    )
    strict: bool = option(False, _MEMORY, "fail instead of compiling a program after the server is ready")
    max_running: int = option(
        0,
        _SCHEDULING,
        "maximum number of requests that run at the same time; auto is 256 on GPUs, 64 elsewhere",
        least=1,
        is_auto=True,
    )
    max_step_tokens: int = option(
        0,
        _SCHEDULING,
        "maximum number of tokens in a step, decodes and prefill chunks together; auto is up to 8192 on GPUs, as "
        "scratch memory allows, and 512 elsewhere",
        least=1,
        is_auto=True,
    )
    max_prefill_tokens: int = option(
        0,
        _SCHEDULING,
        "maximum number of prefill tokens in a step that also decodes; auto keeps such steps of a GPU under about "
        "40 ms, or 120 while many prompt tokens wait, and elsewhere allows whatever max_step_tokens leaves",
        least=1,
        is_auto=True,
    )
    max_decode_steps: int = option(
        0,
        _SCHEDULING,
        "multi-step decode: maximum number of decode steps per dispatch while no request waits; a request that "
        "arrives meanwhile waits for their end; auto is 4 for models on GPUs with steps of less than 1 ms, 1 elsewhere",
        least=1,
        is_auto=True,
    )
    draft_tokens: int = option(
        0,
        _SCHEDULING,
        "maximum number of draft tokens per request and step, taken from the request's own text (prompt lookup) or "
        "proposed by --draft-model; 0 turns speculation off",
        least=0,
    )
    draft_model: str = option(
        "",
        _SCHEDULING,
        "a smaller model with the same tokenizer, given like --model, or an EAGLE-3 head or DFlash drafter of the "
        "served model, which proposes draft tokens; it needs --draft-tokens, and memory beside the served model",
        may_differ=True,
    )
    max_waiting: int = option(
        1024,
        _SCHEDULING,
        "maximum number of waiting requests; further ones are refused",
        least=1,
        is_server_only=True,
        may_differ=True,
    )
    priority_seconds: float = option(
        30.0,
        _SCHEDULING,
        "waiting time in seconds that one level of priority outweighs when requests are admitted",
        least=0,
    )
    seed: int = option(
        -1,
        _SCHEDULING,
        "seed from which requests that have none get theirs, so that the same requests in the same order draw the same "
        "tokens again; -1 draws others each time",
        least=-1,
        may_differ=True,
    )
    prefix_cache: bool = option(
        True, _SCHEDULING, "reuse the KV cache pages of requests that begin with the same tokens"
    )
    attention: str = option(
        "auto",
        _KERNELS,
        "paged attention implementation; auto is tpu on TPUs, cuda on Hopper GPUs, portable on other "
        "GPUs since Ampere, reference elsewhere",
        choices=("auto", "reference", "cuda", "portable", "tpu", "tpu_interpreted"),
    )
    decode_layers: str = option(
        "auto",
        _KERNELS,
        "fused kernels for the layers of small decode steps; auto is cuda on Hopper GPUs, off elsewhere",
        choices=("auto", "off", "reference", "cuda"),
    )
    moe_backend: str = option(
        "auto",
        _KERNELS,
        "implementation of a model's experts; auto is tpu on TPUs, cuda on Hopper GPUs, portable on other GPUs since "
        "Ampere and for 4-bit integers, xla elsewhere",
        choices=("auto", "reference", "xla", "cuda", "portable", "tpu", "tpu_interpreted"),
    )
    all_reduce: str = option(
        "auto",
        _KERNELS,
        "all-reduce of a GPU mesh; p2p writes to the other GPUs' memory, within the fused layers too; auto is p2p for "
        "two or four GPUs of one process that can access each other's memory, xla elsewhere",
        choices=("auto", "xla", "p2p"),
    )
    linear: str = option(
        "auto",
        _KERNELS,
        "GEMMs with quantized weights: xla dequantizes the weights; xla_fp8 and, on Hopper's FP8 tensor cores, "
        "cuda_fp8 also round activations to FP8 if the weights are FP8; portable, on GPUs since Ampere, reads 8- and "
        "4-bit weights once for up to 64 tokens; auto is cuda_fp8 on Hopper GPUs, portable on other GPUs since Ampere, "
        "xla elsewhere",
        choices=("auto", "reference", "xla", "xla_fp8", "cuda_fp8", "portable"),
    )
    host: str = _listening("127.0.0.1", "address to bind")
    port: int = _listening(50051, "gRPC port to bind; 0 picks a free one", least=0, most=65_535)
    http_port: int = _listening(
        -1, "port for /metrics, /livez and /readyz; 0 picks a free one, -1 opens none", least=-1, most=65_535
    )
    allowed_hosts: str = _listening(
        "",
        "names, separated by commas, by which http_port and openai_port may be addressed on a loopback host besides "
        "localhost, such as that of a proxy, and whose web pages may use openai_port without tokens; * allows any",
    )
    gateway_port: int = _listening(
        -1,
        "port for gateways that speak vLLM's gRPC protocol (extra `gateway`); 0 picks a free one, -1 opens none",
        least=-1,
        most=65_535,
    )
    openai_port: int = _listening(
        -1,
        "port for OpenAI's HTTP API; 0 picks a free one, -1 serves none",
        least=-1,
        most=65_535,
    )
    page: bool = _listening(
        True, "serve a web page to chat and to watch the server at / of openai_port; its files need no token"
    )
    batch_dir: str = _listening(
        "",
        "directory in which openai_port keeps files and batches (/v1/files, /v1/batches), of this server alone; empty "
        "serves neither",
    )
    batch_gib: float = _listening(10.0, "GiB that the files of a tenant in batch_dir may have together", least=0.01)
    batch_days: float = _listening(30.0, "days until files and batches in batch_dir are removed", least=0.05)
    adapter_root: str = _listening(
        "",
        "directories, separated by commas, below which administrators may load adapters (LoRA) while the server runs "
        "(LoadAdapter, /v1/load_lora_adapter); empty allows none",
    )
    kv_events: bool = _listening(
        False,
        "publish at the gateway port which pages the prefix cache has (SubscribeKvEvents), so that gateways can send "
        "requests to the server that has their prefixes",
    )
    kv_events_endpoint: str = _listening(
        "",
        "publish kv_events over ZeroMQ, as vLLM does, at this address, such as tcp://127.0.0.1:5557 (extra "
        "`kv-events`); sets kv_events",
    )
    kv_events_replay_endpoint: str = _listening(
        "", "address, such as tcp://127.0.0.1:5558, at which subscribers of kv_events_endpoint request missed events"
    )
    kv_events_topic: str = _listening(
        "",
        "topic of kv_events_endpoint; empty is kv@HOSTNAME@MODEL, from which llm-d learns the pod and the model",
    )
    drain_seconds: float = _listening(
        30.0, "time in seconds that running requests have to finish after SIGTERM", least=0
    )
    allow_insecure: bool = _listening(False, "allow a non-loopback address without TLS or without tokens")
    tls_cert: str = _listening("", "PEM file with the server's certificate chain; read again when it changes")
    tls_key: str = _listening("", "PEM file with the private key of tls_cert")
    tls_client_ca: str = _listening(
        "", "PEM file with the CA that must have signed callers' certificates; enables mutual TLS"
    )
    tokens: str = _listening("", "TOML file of tenants and the digests of their tokens; read again when it changes")
    log_format: str = _observability(
        "text", "format of the log on stderr, which has a line for each finished request", choices=("text", "json")
    )
    trace: bool = _observability(False, "export an OpenTelemetry span for each request by OTLP (extra `tracing`)")
    weights_below: str = _listening(
        "",
        "directories, separated by commas, below which AdminService.UpdateWeights may read the weights that it puts in "
        "the place of the model's; empty refuses it",
    )
    profile_dir: str = _observability("", "directory for profiles that AdminService.StartProfile records")
    coordinator: str = _cluster(
        "", "HOST:PORT of process 0, where the processes meet; 'auto' asks the orchestrator", may_differ=True
    )
    num_processes: int = _cluster(
        1,
        "number of processes that serve together, one on each host; with 'auto' the orchestrator knows",
        may_differ=True,
    )
    process_id: int = _cluster(0, "index of this process; process 0 takes the requests", may_differ=True)
    step_port: int = _cluster(
        50061,
        "port of process 0 at which the other processes join its step stream",
        least=0,
        most=65_535,
        may_differ=True,
    )
    fail_seconds: float = _cluster(
        10.0, "time in seconds within which all processes end if one is lost or stuck", least=_MIN_FAIL_SECONDS
    )
    cluster_token: str = _cluster("", "file with a secret that the processes of a cluster share", may_differ=True)
    cluster_ca: str = _cluster(
        "",
        "PEM file with the authority of every process's tls_cert, for mutual TLS on the step stream",
        may_differ=True,
    )
    logits_processors: bool = option(
        True,
        _KERNELS,
        "serve penalties, bias, bans, log-probabilities and structured output; costs some memory and compile time",
        is_expert=True,
    )
    gemm_backend: str = option(
        "auto",
        _KERNELS,
        "GEMM backend of a GPU for unfused steps, of 64 tokens or more where decode layers are fused: tuned lets XLA "
        "try its own at start-up, library is cuBLAS, which compiles faster; auto is library from jax 0.11 on, tuned "
        "before",
        choices=("auto", "tuned", "library"),
        is_expert=True,
    )
    draft_min_match: int = option(
        3,
        _SCHEDULING,
        "prompt lookup: number of last tokens that must occur earlier in the text; what followed them there is drafted",
        least=1,
        is_expert=True,
    )
    constraint_seconds: float = option(
        10.0,
        _KERNELS,
        "time limit in seconds to compile a constraint, or to compute its masks for a step",
        least=0.1,
        may_differ=True,
        is_expert=True,
    )
    constraint_memory_mib: int = option(
        512,
        _KERNELS,
        "memory limit in MiB of the process that compiles and follows a constraint",
        least=64,
        may_differ=True,
        is_expert=True,
    )
    dispatch_threads: bool = option(
        True, _KERNELS, "with several GPUs, dispatch to each from a separate thread", is_expert=True
    )

    @property
    def num_adapter_slots(self) -> int:
        """How many adapters the devices hold at the same time; 0: the server has no adapters."""
        return self.max_adapters or (_ADAPTER_SLOTS if self.adapter or self.adapter_root else 0)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The paths of the adapters in the options, by name."""
        pairs = (each.partition("=") for each in self.adapter)
        return {name: path for name, _, path in pairs}

    def __post_init__(self) -> None:
        for name, each in options().items():
            each.check(name, getattr(self, name))
        check_combinations(self)
