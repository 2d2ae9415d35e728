"""What a model is (`ModelConfig`, read from config.json) and how to serve it (`ServeConfig`, flags and TOML).

Each option of `ServeConfig` is written once, here: the command line's flags and the TOML keys are generated from it.
"""

import dataclasses
import difflib
import json
import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError, UnsupportedModelError

_MIN_FAIL_SECONDS = 1.0  # below it a busy machine looks like a dead one

SUPPORTED_ARCHITECTURE = "Qwen3ForCausalLM"
_DEFAULT_MAX_CONTEXT = 32_768  # tokens, where the model allows more and the config does not say

# Keys of config.json that change nothing about the forward pass of a served model.
_IGNORED_KEYS = frozenset(
    "_name_or_path attention_dropout bos_token_id chunk_size_feed_forward eos_token_id id2label initializer_range "
    "is_encoder_decoder label2id max_window_layers output_attentions output_hidden_states pad_token_id problem_type "
    "return_dict sliding_window transformers_version use_cache".split()
)
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings".split()
)
_REQUIRED_KEYS = (*_SIZES, "rms_norm_eps", "tie_word_embeddings")
# Options that must have the one value meshserve implements.
_FIXED_OPTIONS: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
}
_ROPE_KEYS = frozenset("rope_theta rope_scaling rope_parameters".split())
_DTYPE_KEYS = frozenset("dtype torch_dtype".split())
_YARN_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow truncate "
    "mscale mscale_all_dim".split()
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default", "linear" or "yarn"; the rest is read by the scaled kinds only."""

    theta: float
    kind: str
    factor: float
    original_max_positions: int
    attention_factor: float  # multiplies cos and sin; 1 but for YaRN
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Qwen3 dense model, as its config.json describes it. There are no defaults: the file says everything."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    is_tied: bool  # the output head is the embedding
    dtype: str  # of the checkpoint: "bfloat16", "float32" or "float16"
    rope: RopeConfig

    @property
    def longest_context(self) -> int:
        """Tokens of prompt and output that its positions are made for: with rope scaling, `factor` times the original
        ones, as vLLM takes them."""
        return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))

    @property
    def num_params(self) -> int:
        """Weights of the unsharded model, padding left out."""
        heads = (2 * self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim * self.embed_dim
        layer = heads + 3 * self.mlp_dim * self.embed_dim + 2 * self.embed_dim + 2 * self.head_dim
        tables = (1 if self.is_tied else 2) * self.vocab_size * self.embed_dim
        return self.num_layers * layer + tables + self.embed_dim

    @classmethod
    def from_file(cls, path: Path) -> "ModelConfig":
        """Reads config.json.

        Raises:
          UnsupportedModelError: the file is missing, or names an architecture or option that is not implemented.
        """
        try:
            return cls.from_dict(read_json(path))
        except FileNotFoundError:
            raise UnsupportedModelError(
                f"{path} does not exist. --model takes a Hugging Face model directory."
            ) from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """As `from_file`, from the parsed file."""
        _check_options(raw)
        return cls(
            vocab_size=raw["vocab_size"],
            embed_dim=raw["hidden_size"],
            mlp_dim=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_query_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=_number(raw, "rms_norm_eps", above=0.0),
            max_positions=raw["max_position_embeddings"],
            is_tied=raw["tie_word_embeddings"],
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            rope=_rope_config(raw),
        )


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a model says.

    Raises:
      FileNotFoundError: there is none.
      UnsupportedModelError: it cannot be read, or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} holds JSON of type {type(value).__name__}; it must be an object.")
    return value


def _require(ok: bool, options: Mapping[str, Any], key: str, allowed: str) -> None:
    if not ok:
        raise UnsupportedModelError(f"config.json: {key} is {options[key]!r}; allowed is {allowed}.")


def _number(options: Mapping[str, Any], key: str, *, above: float, default: float = math.nan) -> float:
    """A finite number above a bound; `default` where the file has none."""
    value = options.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    _require(is_number and above < value < math.inf, options, key, f"a number above {above:g}")
    return float(value)


def _check_options(raw: Mapping[str, Any]) -> None:
    if raw.get("architectures") != [SUPPORTED_ARCHITECTURE]:
        raise UnsupportedModelError(
            f"config.json: architectures is {raw.get('architectures')!r}; served is [{SUPPORTED_ARCHITECTURE!r}]."
        )
    missing = [key for key in _REQUIRED_KEYS if raw.get(key) is None]
    if missing:
        raise UnsupportedModelError(f"config.json lacks {', '.join(missing)}. Add what the model was trained with.")
    for key in _SIZES:
        _require(type(raw[key]) is int and raw[key] >= 1, raw, key, "a whole number, 1 or more")
    _require(raw["head_dim"] % 2 == 0, raw, "head_dim", "an even number")
    _require(type(raw["tie_word_embeddings"]) is bool, raw, "tie_word_embeddings", "true or false")
    for key, allowed in _FIXED_OPTIONS.items():
        if raw.get(key, allowed) != allowed:
            raise UnsupportedModelError(f"config.json: {key} is {raw[key]!r}; meshserve implements {allowed!r} only.")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError(f"config.json: layer_types is {layer_types!r}; only full_attention is served.")
    known = {
        *_REQUIRED_KEYS,
        *_FIXED_OPTIONS,
        *_IGNORED_KEYS,
        *_ROPE_KEYS,
        *_DTYPE_KEYS,
        "architectures",
        "layer_types",
    }
    unknown = sorted(key for key, value in raw.items() if key not in known and value is not None)
    if unknown:
        raise UnsupportedModelError(
            f"config.json has options meshserve does not know: {', '.join(unknown)}. It refuses what it cannot honour."
        )
    if raw["num_attention_heads"] % raw["num_key_value_heads"]:
        raise UnsupportedModelError(
            f"config.json: {raw['num_attention_heads']} query heads are not a multiple of "
            f"{raw['num_key_value_heads']} KV heads."
        )


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`."""
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = raw.get(key) or {}
        _require(isinstance(given, dict), raw, key, "an object")
        scaling |= given
    with_theta = {"rope_theta": raw.get("rope_theta"), **scaling}
    if with_theta["rope_theta"] is None:
        raise UnsupportedModelError("config.json names no rope_theta. Add what the model was trained with.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    allowed = {"default": {"rope_type", "type", "rope_theta"}, "yarn": _YARN_KEYS}
    allowed["linear"] = allowed["default"] | {"factor"}
    if not isinstance(kind, str) or kind not in allowed:
        raise UnsupportedModelError(
            f"config.json: rope scaling {kind!r} is not implemented; meshserve honours {', '.join(sorted(allowed))}."
        )
    unknown = sorted(key for key in scaling if key not in allowed[kind])
    if unknown:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} has unknown options {', '.join(unknown)}.")
    if kind != "default" and scaling.get("factor") is None:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} needs a factor.")
    factor = _number(scaling, "factor", above=0.0, default=1.0)
    _require(factor >= 1.0, scaling, "factor", "1 or more")
    original_key, max_positions = "original_max_position_embeddings", raw["max_position_embeddings"]
    truncate = scaling.get("truncate", True)
    _require(type(truncate) is bool, scaling, "truncate", "true or false")
    return RopeConfig(
        theta=_number(with_theta, "rope_theta", above=1.0),
        kind=kind,
        factor=factor,
        original_max_positions=int(_number(scaling, original_key, above=0.0, default=max_positions)),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        beta_fast=_number(scaling, "beta_fast", above=0.0, default=32.0),
        beta_slow=_number(scaling, "beta_slow", above=0.0, default=1.0),
        truncate=truncate,
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The temperature of YaRN (arXiv 2309.00071, section 3.4) unless the file states it."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", above=0.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(_number(scaling, "mscale", above=0.0)) / mscale(_number(scaling, "mscale_all_dim", above=0.0))
    return mscale(1.0)


def option(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    """A field of `ServeConfig`: its default, its help line, and the values it takes if they are few."""
    return field(default=default, metadata={"help": help, "choices": choices})


# The least and the most that options may be.
_RANGES: Mapping[str, tuple[int, float]] = {
    **dict.fromkeys(
        ("tp", "page_size", "max_running", "max_step_tokens", "max_waiting", "max_decode_steps", "draft_min_match"),
        (1, math.inf),
    ),
    **dict.fromkeys(
        ("cpu_devices", "num_pages", "reserve_mib", "compile_threads", "max_context", "max_prefill_tokens"),
        (0, math.inf),
    ),
    **dict.fromkeys(("draft_tokens", "priority_seconds", "drain_seconds"), (0, math.inf)),
    **dict.fromkeys(("port", "step_port"), (0, 65_535)),
    **dict.fromkeys(("http_port", "gateway_port"), (-1, 65_535)),
}


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything about how a model is served. The defaults serve a small model on one device."""

    model: str = option("", "model directory: Hugging Face or Orbax, local, gs:// or s3://; or 'demo'")
    tp: int = option(1, "tensor-parallel degree: the number of devices in the mesh")
    cpu_devices: int = option(0, "serve on this many virtual CPU devices; 0 uses the accelerators")
    dtype: str = option(
        "auto",
        "of weights, activations and KV cache; auto: bfloat16, but float32 for a float32 model and on CPU devices",
        ("auto", "bfloat16", "float32"),
    )
    random_weights: bool = option(
        False, "make the weights up on the devices, to measure with; --model may name a published size, as qwen3-8b"
    )
    page_size: int = option(32, "tokens a KV page")
    num_pages: int = option(0, "KV pages of each device; 0 takes memory_fraction of what the weights leave")
    memory_fraction: float = option(0.85, "share of device memory for weights and KV cache together")
    reserve_mib: int = option(512, "device memory to leave free beside weights, KV cache and the programs' scratch")
    cache_dir: str = option("~/.cache/meshserve", "folder for compiled programs between starts; empty keeps none")
    compile_threads: int = option(0, "programs compiled at a time; 0: one for each core, at most 8")
    strict: bool = option(False, "refuse to compile anything after the server is ready")
    max_context: int = option(0, "tokens of prompt and output together; 0 takes the model's own limit, at most 32768")
    max_running: int = option(64, "requests in one step")
    max_step_tokens: int = option(512, "token budget of one step: decodes and prefill chunks together")
    max_prefill_tokens: int = option(0, "of a step that also decodes; 0: all that max_step_tokens leaves")
    max_decode_steps: int = option(1, "decode steps in one dispatch when nothing waits: newcomers wait that long")
    draft_tokens: int = option(
        0, "tokens that a decode guesses ahead from its own text, at most (prompt lookup); 0: off"
    )
    draft_min_match: int = option(3, "tokens that must stand in a text before, for a guess at what follows them")
    max_waiting: int = option(1024, "requests in the queue; more are refused")
    priority_seconds: float = option(30.0, "one step of a request's priority goes before this much longer a wait")
    prefix_cache: bool = option(True, "reuse the KV pages of requests that begin alike")
    logits_processors: bool = option(True, "serve penalties, bias, bans, log-probabilities; some memory and compile time")
    attention: str = option(
        "auto",
        "paged attention implementation; auto: tpu on a TPU, cuda on a Hopper GPU, else reference",
        ("auto", "reference", "cuda", "tpu", "tpu_interpreted"),
    )
    decode_layers: str = option(
        "auto",
        "fused kernels for the layers of small decode steps; auto: cuda on a Hopper GPU, else off",
        ("auto", "off", "reference", "cuda"),
    )
    gemm_backend: str = option(
        "auto",
        "who multiplies on a GPU in steps of 64 tokens and more that are not fused; tuned: what is fastest in XLA's "
        "trials at start-up; library: cuBLAS, with less to compile and, from jax 0.11 on, no copies of weights; auto: "
        "library from then on",
        ("auto", "tuned", "library"),
    )
    all_reduce: str = option(
        "auto",
        "how the shards of a GPU mesh add up; peers: by stores into each other's memory, inside the fused layers; "
        "auto: peers on two and four GPUs of one process that reach it",
        ("auto", "xla", "p2p"),
    )
    dispatch_threads: bool = option(True, "on several GPUs, XLA dispatches to each from a thread of its own")
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(50051, "port to bind; 0 takes a free one")
    drain_seconds: float = option(30.0, "after SIGTERM, the time running requests have to finish")
    allow_insecure: bool = option(False, "bind a non-loopback address without TLS, or without tokens")
    tls_cert: str = option("", "PEM file of the server's certificate chain; read again when it changes")
    tls_key: str = option("", "PEM file of its private key")
    tls_client_ca: str = option("", "PEM file of the authority that callers' certificates must come from (mutual TLS)")
    tokens: str = option("", "TOML file of tenants and the digests of their tokens; read again when it changes")
    http_port: int = option(-1, "port for /metrics, /livez and /readyz; 0 takes a free one, -1 opens none")
    gateway_port: int = option(-1, "port for gateways that speak VllmEngine (extra `gateway`); 0 and -1 as above")
    log_format: str = option("text", "of the log on stderr; json has a line for each request", ("text", "json"))
    trace: bool = option(False, "export an OpenTelemetry span for each request by OTLP (extra `tracing`)")
    profile_dir: str = option("", "folder for the profiles that AdminService.StartProfile records")
    served_name: str = option("", "model name in GetModelInfo; by default the directory's name")
    coordinator: str = option("", "HOST:PORT where several processes meet, of process 0; 'auto': ask the orchestrator")
    num_processes: int = option(1, "processes that serve together, one on each host; with 'auto' the orchestrator's")
    process_id: int = option(0, "which of them this one is; 0 takes the requests")
    step_port: int = option(50061, "port of process 0 at which the others join its step stream")
    fail_seconds: float = option(10.0, "within this time all processes end if one is lost or stuck")
    cluster_token: str = option("", "file with a secret that the processes of a cluster share")
    cluster_ca: str = option("", "PEM file of the authority of all processes' tls_cert: mutual TLS on the step stream")

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                allowed = f"{least} or more" if most == math.inf else f"{least} to {most}"
                raise ConfigError(f"{name} is {value}; it must be {allowed}.")
        if self.max_context == 1:
            raise ConfigError("max_context is 1; it must be 2 or more (a prompt and one token), or 0: the model's.")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ConfigError("tls_cert and tls_key go together, and tls_client_ca needs both.")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1.")
        if self.max_step_tokens < self.max_running:
            raise ConfigError(
                f"max_step_tokens is {self.max_step_tokens} and max_running {self.max_running}: every running request "
                "decodes one token a step, so the budget must be at least as large. Raise it or lower max_running."
            )
        if self.max_decode_steps > self.page_size:
            raise ConfigError(
                f"max_decode_steps is {self.max_decode_steps}; allowed is 1 to page_size ({self.page_size}): a request "
                "begins at most one page in a dispatch. Lower it or raise page_size."
            )
        if self.draft_tokens >= self.page_size:
            raise ConfigError(
                f"draft_tokens is {self.draft_tokens}; allowed is 0 to page_size - 1 ({self.page_size - 1}): a request "
                "begins at most one page in a step. Lower it or raise page_size."
            )
        self._check_cluster()
        if self.cpu_devices and self.cpu_devices < self.tp and not self.coordinator:
            raise ConfigError(
                f"tp is {self.tp} but cpu_devices only {self.cpu_devices}. Raise cpu_devices or leave it 0."
            )
        self._check_choices()

    def _check_choices(self) -> None:
        for option_field in dataclasses.fields(self):
            if option_field.type is float and not math.isfinite(getattr(self, option_field.name)):
                raise ConfigError(f"{option_field.name} is {getattr(self, option_field.name)}; it must be finite.")
            choices = option_field.metadata["choices"]
            if choices and getattr(self, option_field.name) not in choices:
                raise ConfigError(
                    f"{option_field.name} is {getattr(self, option_field.name)!r}; it takes {', '.join(choices)}."
                )

    def _check_cluster(self) -> None:
        is_explicit = self.coordinator not in ("", "auto")
        host, _, port = self.coordinator.rpartition(":")
        if is_explicit and not (host and port.isdigit()):
            raise ConfigError(f"coordinator is {self.coordinator!r}; it takes HOST:PORT of process 0, or 'auto'.")
        if self.num_processes < 1 or not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"process_id is {self.process_id} and num_processes {self.num_processes}; the processes are numbered "
                "from 0 to num_processes - 1."
            )
        if self.num_processes > 1 and not is_explicit:
            raise ConfigError(
                f"num_processes is {self.num_processes} and coordinator {self.coordinator!r}. Name the coordinator; "
                "with 'auto' leave num_processes and process_id out, the orchestrator knows them."
            )
        if self.fail_seconds < _MIN_FAIL_SECONDS:
            raise ConfigError(f"fail_seconds is {self.fail_seconds}; it must be {_MIN_FAIL_SECONDS:g} or more.")
        if self.cluster_ca and not self.tls_cert:
            raise ConfigError("cluster_ca needs tls_cert and tls_key: what this process shows the others.")


def serving_dtype(config: ServeConfig, model: ModelConfig, platform: str) -> str:
    """Of weights, activations and cache, on jax's `platform`. A float16 checkpoint is served in bfloat16, which has
    float32's range; on CPUs nothing is, as XLA computes in float32 there, and before jax 0.11.2 copies the whole cache
    in every step."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if model.dtype == "float32" or platform == "cpu" else "bfloat16"


def context_tokens(config: ServeConfig, model: ModelConfig) -> int:
    """The most tokens of prompt and output together that a request may have.

    Raises:
      ConfigError: max_context is more than the model was made for.
    """
    if config.max_context > model.longest_context:
        scaled = f" times a rope factor of {model.rope.factor:g}" if model.rope.factor > 1.0 else ""
        raise ConfigError(
            f"max_context is {config.max_context}; the model was made for {model.longest_context} tokens "
            f"(max_position_embeddings{scaled}). Lower it, or configure YaRN rope scaling in the model's config.json."
        )
    return config.max_context or min(model.longest_context, _DEFAULT_MAX_CONTEXT)


def read_toml(path: Path) -> dict[str, Any]:
    """The options a TOML file sets, checked against `ServeConfig`: an unknown key names its nearest neighbour.

    Raises:
      ConfigError: no such file, bad TOML, an unknown key, or a value of the wrong type.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:  # no TOML, or a number or a nesting beyond what Python reads
        raise ConfigError(f"--config {path}: {error}.") from None
    types = {option_field.name: option_field.type for option_field in dataclasses.fields(ServeConfig)}
    for key, value in raw.items():
        if key not in types:
            near = difflib.get_close_matches(key, types, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known keys: {', '.join(types)}."
            raise ConfigError(f"--config {path}: unknown key {key!r}.{hint}")
        expected = types[key]
        if expected is float and type(value) is int and abs(value) <= sys.float_info.max:
            raw[key] = float(value)
        elif type(value) is not expected:
            raise ConfigError(
                f"--config {path}: {key} is {value!r}; it must be of type {getattr(expected, '__name__', expected)}."
            )
    return raw
