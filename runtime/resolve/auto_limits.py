"""Chooses the limits of steps for which the options say `auto`, from the device, its memory and the model.

GPUs get limits that were the best, or within 3 % of the best, for Qwen3-0.6B and 8B on an H200 (docs/log/decode.md),
scaled by what steps take with the chosen kernels.
Other devices keep small limits: virtual CPU devices are for trying things out, and TPUs have not been measured.
"""

import dataclasses
from collections.abc import Callable

from meshserve.sharding.chips import Chip

from ..options.serve_config import ServeConfig
from .kernel_costs import KernelCosts

GPU_MEMORY_FRACTION = 0.92  # the rest is for the driver, communication between GPUs, and programs' code
_REPORTED_FRACTION = 0.85  # share of the memory that other devices report

GPU_RUNNING, _GPU_STEP_TOKENS = 256, 8192
_GPU_EXPERT_STEP_TOKENS = 16_384  # each expert gets few of them (docs/log/experts.md)
_SMALL_RUNNING, _SMALL_STEP_TOKENS = 64, 512
_LEAST_PREFILL_TOKENS = 256
_PREFILL_SECONDS = 0.11  # in a step that also decodes: how long a prompt may delay tokens (docs/decisions/038)
_LOW_LOAD_PREFILL_SECONDS = 0.035  # the same at low load (docs/decisions/071)
_PROMPT_TOKENS = 1024  # length of the prompts for which steps are estimated
_SCRATCH_SHARE = 0.02  # share of the device memory for the largest step
_REQUESTS_SHARE = 0.025  # the same for the logits, and the history and bias, of all requests that run
_LOGIT_BYTES = 20  # of each token of the vocabulary: see `memory_plan`
_SHORT_STEP_SECONDS = 0.001  # for decode steps that take the host as long as the device
_SHORT_STEPS = 4  # per dispatch: more gained nothing, and text would arrive in larger pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimits:
    """How much a step may hold. None of the limits is `auto`.

    Attributes:
      max_running: Requests that run at the same time.
      max_step_tokens: Tokens of a step.
      max_prefill_tokens: Prefill tokens of a step that also decodes; 0 allows whatever `max_step_tokens` leaves.
      low_load_prefill_tokens: The same at low load (`SchedulerLimits.has_few_new`); 0 if there is no difference.
      max_decode_steps: Decode steps of a dispatch.
      multi_step_requests: Requests up to which a dispatch holds several decode steps; 0: any number.
    """

    max_running: int
    max_step_tokens: int
    max_prefill_tokens: int
    max_decode_steps: int
    low_load_prefill_tokens: int = 0
    multi_step_requests: int = 0

    def __str__(self) -> str:
        prefill: int | str = self.max_prefill_tokens or "no limit"
        if self.low_load_prefill_tokens:
            prefill = f"{prefill} ({self.low_load_prefill_tokens} at low load)"
        return (
            f"max_running {self.max_running}, max_step_tokens {self.max_step_tokens}, max_prefill_tokens {prefill}, "
            f"max_decode_steps {self.max_decode_steps}"
            + (f" (with {self.multi_step_requests} or fewer requests)" if self.multi_step_requests else "")
        )


def choose_limits(config: ServeConfig, costs: KernelCosts, *, platform: str, chip: Chip | None) -> StepLimits:
    """Returns the limits that the options name, and for `auto` those that suit the device.

    Args:
      config: The options.
      costs: What steps cost with the chosen kernels.
      platform: JAX's name for the devices' platform.
      chip: The devices; needed for GPUs only.
    """
    if platform != "gpu":
        step_tokens = config.max_step_tokens or max(_SMALL_STEP_TOKENS, config.max_running)
        return StepLimits(
            max_running=config.max_running or min(_SMALL_RUNNING, step_tokens),
            max_step_tokens=step_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_decode_steps=config.max_decode_steps or 1,
        )
    assert chip is not None
    speed = _Speed(costs=costs, chip=chip)
    step_tokens = config.max_step_tokens or max(speed.step_tokens_in_scratch(), config.max_running)
    most, low_load = (
        min(speed.prefill_tokens_in(seconds), step_tokens) for seconds in (_PREFILL_SECONDS, _LOW_LOAD_PREFILL_SECONDS)
    )
    num_steps = config.max_decode_steps or min(speed.decode_steps(), config.page_size)
    return StepLimits(
        max_running=config.max_running or min(speed.running_in_memory(), step_tokens),
        max_step_tokens=step_tokens,
        max_prefill_tokens=config.max_prefill_tokens or most,
        max_decode_steps=num_steps,
        low_load_prefill_tokens=low_load if low_load < most and not config.max_prefill_tokens else 0,
        multi_step_requests=speed.multi_step_requests() if num_steps > 1 and not config.max_decode_steps else 0,
    )


def usable_share(config: ServeConfig, platform: str) -> float:
    """Returns the share of the memory that devices report which a server may use.

    GPUs report what the server has claimed (`sharding.mesh.claim_gpu_memory`), all of which it may use.
    """
    return 1.0 if platform == "gpu" else config.memory_fraction or _REPORTED_FRACTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Speed:
    """What a GPU's share of a model takes with the chosen kernels."""

    costs: KernelCosts
    chip: Chip

    def _seconds_of_weights(self, num_decodes: int) -> float:
        """The time to read what these tokens are multiplied with, if they choose experts at random.

        4-bit weights count like 8-bit ones: steps take as long (docs/log/decode.md).
        """
        shapes = self.costs.shapes
        model, dtype, num_devices = shapes.model, shapes.dtype, shapes.layout.num_shards
        embedding = model.vocab_size * model.embed_dim / num_devices
        layer_bytes = dtype.itemsize if model.layer_quantization is None else 1
        head_bytes = dtype.itemsize if model.head_quantization is None else 1
        in_layers = model.num_active_params / num_devices - (embedding if model.is_tied else 2 * embedding)
        if model.experts is not None:
            left_out = 1 - model.experts.num_chosen / model.experts.num_experts  # share of the experts, by a token
            others = (model.num_params - model.num_active_params) / num_devices
            in_layers += others * (1 - left_out ** (num_decodes - 1))
        return (in_layers * layer_bytes + embedding * head_bytes) / self.chip.hbm_bytes_per_second

    def running_in_memory(self) -> int:
        shapes = self.costs.shapes
        request_bytes = _LOGIT_BYTES * shapes.layout.vocab_size / shapes.layout.num_shards

        def fit(num_requests: int) -> bool:
            return num_requests * request_bytes <= _REQUESTS_SHARE * self.chip.hbm_bytes

        return _halved(GPU_RUNNING, _SMALL_RUNNING, fit)

    def step_tokens_in_scratch(self) -> int:
        shapes = self.costs.shapes
        model, most_bytes = shapes.model, _SCRATCH_SHARE * self.chip.hbm_bytes
        largest, mlp = _GPU_STEP_TOKENS, 2 * model.mlp_dim / shapes.layout.num_shards
        if model.experts is not None:  # a token's row for each of its experts, before and after it
            largest, mlp = _GPU_EXPERT_STEP_TOKENS, 2 * model.experts.num_chosen * model.embed_dim
        token_bytes = (3 * model.embed_dim + mlp) * shapes.dtype.itemsize

        def fits(num_tokens: int) -> bool:
            attention = self.costs.attention(self.costs.prompt_step(num_tokens, _PROMPT_TOKENS))
            return num_tokens * token_bytes + attention.scratch_bytes <= most_bytes

        return _halved(largest, _SMALL_STEP_TOKENS, fits)

    def prefill_tokens_in(self, seconds: float) -> int:
        def is_short(num_tokens: int) -> bool:
            return self.costs.prompt_seconds(self.chip, num_tokens, _PROMPT_TOKENS) <= seconds

        return _halved(_GPU_STEP_TOKENS, _LEAST_PREFILL_TOKENS, is_short)

    def decode_steps(self) -> int:
        """Returns how many steps a dispatch holds; one if the host launches a step's kernels, which takes it long."""
        is_in_graph = not self.costs.decode(1, _PROMPT_TOKENS).num_launches
        return _SHORT_STEPS if is_in_graph and self._seconds_of_weights(1) < _SHORT_STEP_SECONDS else 1

    def multi_step_requests(self) -> int:
        """Returns for how many requests weights are read in a short time, if they are for one; 0: for any number."""
        if self._seconds_of_weights(GPU_RUNNING) < _SHORT_STEP_SECONDS:
            return 0
        sizes = [1 << power for power in range(GPU_RUNNING.bit_length())]
        return max(size for size in sizes if self._seconds_of_weights(size) < _SHORT_STEP_SECONDS)


def _halved(size: int, least: int, is_allowed: Callable[[int], bool]) -> int:
    """Halves `size` until it is allowed, but not below `least`."""
    while size > least and not is_allowed(size):
        size //= 2
    return size
