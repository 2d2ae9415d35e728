"""Chooses the limits of steps for which the options say `auto`, from the device, its memory and the model.

GPUs get limits that were the best, or within 3 % of the best, for Qwen3-0.6B and 8B on an H200 (docs/log/decode.md).
Other devices keep small limits: virtual CPU devices are for trying things out, and TPUs have not been measured.
"""

import dataclasses

import jax.numpy as jnp

from meshserve.sharding.chips import Chip

from ..api.model_config import ModelConfig
from ..options.serve_config import ServeConfig

GPU_MEMORY_FRACTION = 0.92  # the rest is for the driver, communication between GPUs, and programs' code
_REPORTED_FRACTION = 0.85  # of what other devices report

GPU_RUNNING, _GPU_STEP_TOKENS = 256, 8192
_GPU_EXPERT_STEP_TOKENS = 16_384  # each expert gets few of them (docs/log/experts.md)
_SMALL_RUNNING, _SMALL_STEP_TOKENS = 64, 512
_LEAST_PREFILL_TOKENS = 256
_PREFILL_SECONDS = 0.11  # in a step that also decodes: how long a prompt may delay tokens (docs/decisions/038)
_LOW_LOAD_PREFILL_SECONDS = 0.035  # the same at low load (docs/decisions/071)
_REACHED_FLOPS = 0.62  # share of the data sheet's (bfloat16) that prefill reaches (docs/log/prefill.md)
_REACHED_FP8_FLOPS = 1.2  # the same where dense FP8 weights are multiplied on FP8 tensor cores (docs/log/decode.md)
_SCRATCH_SHARE = 0.02  # of the device memory, for the largest step
_SHORT_STEP_SECONDS = 0.001  # for decode steps that take the host as long as the device
_SHORT_STEPS = 4  # per dispatch: more gained nothing, and text would arrive in larger pieces
_UNKNOWN_MEMORY_BYTES, _UNKNOWN_FLOPS, _UNKNOWN_BYTES_PER_SECOND = 24 << 30, 150e12, 1e12


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


def choose_limits(
    config: ServeConfig, model: ModelConfig, *, platform: str, chip: Chip | None, num_devices: int, dtype: jnp.dtype
) -> StepLimits:
    """Returns the limits that the options name, and for `auto` those that suit the device.

    Args:
      config: The options.
      model: The model.
      platform: JAX's name for the devices' platform.
      chip: The devices, or None if they are not in `chips.CHIPS`; a GPU is then taken for a small one.
      num_devices: TP size.
      dtype: Of weights and activations.
    """
    if platform != "gpu":
        step_tokens = config.max_step_tokens or max(_SMALL_STEP_TOKENS, config.max_running)
        return StepLimits(
            max_running=config.max_running or min(_SMALL_RUNNING, step_tokens),
            max_step_tokens=step_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_decode_steps=config.max_decode_steps or 1,
        )
    speed = _Speed(model=model, chip=chip, num_devices=num_devices, dtype=dtype, linear=config.linear)
    step_tokens = config.max_step_tokens or max(speed.step_tokens_in_scratch(), config.max_running)
    most, low_load = (
        min(speed.prefill_tokens_in(seconds), step_tokens) for seconds in (_PREFILL_SECONDS, _LOW_LOAD_PREFILL_SECONDS)
    )
    num_steps = config.max_decode_steps or min(speed.decode_steps(), config.page_size)
    return StepLimits(
        max_running=config.max_running or min(GPU_RUNNING, step_tokens),
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
    """What a GPU's share of a model takes, estimated from its number and bytes of weights."""

    model: ModelConfig
    chip: Chip | None
    num_devices: int
    dtype: jnp.dtype
    linear: str  # the option

    @property
    def _num_weights(self) -> float:
        """Weights that a token is multiplied with, on each device."""
        embedding = 0 if self.model.is_tied else self.model.vocab_size * self.model.embed_dim
        return (self.model.num_active_params - embedding) / self.num_devices

    def _seconds_of_weights(self, num_decodes: int) -> float:
        """The time to read what these tokens are multiplied with, if they choose experts at random.

        4-bit weights count like 8-bit ones: steps take as long (docs/log/decode.md).
        """
        model, head = self.model, self.model.vocab_size * self.model.embed_dim / self.num_devices
        layer_bytes = self.dtype.itemsize if model.layer_quantisation is None else 1
        head_bytes = self.dtype.itemsize if model.head_quantisation is None else 1
        in_layers = self._num_weights - head
        if model.experts is not None:
            left_out = 1 - model.experts.num_chosen / model.experts.num_experts  # share of the experts, by a token
            others = (model.num_params - model.num_active_params) / self.num_devices
            in_layers += others * (1 - left_out ** (num_decodes - 1))
        bandwidth = self.chip.hbm_bytes_per_second if self.chip is not None else _UNKNOWN_BYTES_PER_SECOND
        return (in_layers * layer_bytes + head * head_bytes) / bandwidth

    @property
    def _has_fp8_products(self) -> bool:
        """Whether most of prefill runs on FP8 tensor cores; see `linear.gpu`."""
        quantisation = self.model.layer_quantisation
        is_fp8 = quantisation is not None and not quantisation.is_int4 and self.dtype == jnp.bfloat16
        is_hopper = self.chip is not None and self.chip.is_hopper
        return is_fp8 and is_hopper and self.model.experts is None and self.linear in ("auto", "cuda_fp8")

    def step_tokens_in_scratch(self) -> int:
        memory = self.chip.hbm_bytes if self.chip is not None else _UNKNOWN_MEMORY_BYTES
        largest, mlp = _GPU_STEP_TOKENS, 2 * self.model.mlp_dim / self.num_devices
        if self.model.experts is not None:  # a token's row for each of its experts, before and after it
            largest, mlp = _GPU_EXPERT_STEP_TOKENS, 2 * self.model.experts.num_chosen * self.model.embed_dim
        token_bytes = (3 * self.model.embed_dim + mlp) * self.dtype.itemsize
        most = _SCRATCH_SHARE * memory / token_bytes
        return _halved(largest, _SMALL_STEP_TOKENS, most)

    def prefill_tokens_in(self, seconds: float) -> int:
        flops = self.chip.flops_per_second if self.chip is not None else _UNKNOWN_FLOPS
        reached = _REACHED_FP8_FLOPS if self._has_fp8_products else _REACHED_FLOPS
        most = seconds * reached * flops / (2 * self._num_weights)
        return _halved(_GPU_STEP_TOKENS, _LEAST_PREFILL_TOKENS, most)

    def decode_steps(self) -> int:
        return _SHORT_STEPS if self._seconds_of_weights(1) < _SHORT_STEP_SECONDS else 1

    def multi_step_requests(self) -> int:
        """Returns for how many requests weights are read in a short time, if they are for one; 0: for any number."""
        if self._seconds_of_weights(GPU_RUNNING) < _SHORT_STEP_SECONDS:
            return 0
        sizes = [1 << power for power in range(GPU_RUNNING.bit_length())]
        return max(size for size in sizes if self._seconds_of_weights(size) < _SHORT_STEP_SECONDS)


def _halved(size: int, least: int, most: float) -> int:
    """Halves `size` until it is at most `most`, but not below `least`."""
    while size > max(least, most):
        size //= 2
    return size
