"""What a step costs with the chosen kernels, on the device that has the most to do, and how long that takes a chip.

Serves `meshserve plan`, the expected speed in the log, and the limits of steps.
"""

import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from meshserve.kernels import decode_layers, experts, linear, paged_attention
from meshserve.kernels.decode_layers import DecodeImplementation
from meshserve.kernels.experts import ExpertStep
from meshserve.kernels.experts.contract import least_cost as least_expert_cost
from meshserve.kernels.implementation import Cost, Implementation
from meshserve.kernels.linear.contract import least_cost as least_product_cost
from meshserve.kernels.paged_attention import AttentionStep
from meshserve.kernels.paged_attention.contract import least_cost as least_attention_cost
from meshserve.sharding.chips import Chip

from .expert_load import expert_load
from .kernel_names import KernelNames
from .kernel_selection import max_fused_tokens
from .kernel_shapes import KernelShapes

LAUNCH_SECONDS = 4e-6  # guessed: of a kernel that the host launches by itself


class Seconds(NamedTuple):
    """How long a cost takes a chip, in parts. Memory and computation overlap."""

    memory: float
    compute: float
    launches: float

    @property
    def total(self) -> float:
        return max(self.memory, self.compute) + self.launches

    @property
    def bound(self) -> str:
        """The part that takes most of the time."""
        longest = max(self.memory, self.compute)
        if self.launches > longest:
            return "launches"
        return "memory" if self.memory >= self.compute else "compute"


def seconds_on(chip: Chip, cost: Cost, reached: Implementation | None = None) -> Seconds:
    """Returns how long a cost takes at the speeds of the data sheet.

    Args:
      chip: The chip.
      cost: The cost.
      reached: An implementation, whose shares of these speeds are assumed. None assumes all of them.
    """
    share, fp8_share, bytes_share = 1.0, 1.0, 1.0
    if reached is not None:
        share, fp8_share, bytes_share = reached.reached, reached.fp8_reached, reached.bytes_reached
    compute = cost.operations / (share * chip.flops_per_second)
    compute += cost.fp8_operations / (fp8_share * (chip.fp8_flops_per_second or chip.flops_per_second))
    compute += cost.float32_operations / (chip.vector_flops_per_second or chip.flops_per_second)
    memory = cost.num_bytes / (bytes_share * chip.hbm_bytes_per_second)
    return Seconds(memory, compute, cost.num_launches * LAUNCH_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCosts:
    """The costs of the parts of a step, in all layers.

    Attributes:
      shapes: Those of the model on each device.
      names: The chosen kernels. None: the least that any kernels take, which read everything once as it is stored.
    """

    shapes: KernelShapes
    names: KernelNames | None = None

    @property
    def used(self) -> list[Implementation]:
        """The implementations that take most of a step's time."""
        if self.names is None:
            return []
        names = self.names
        found: list[Implementation] = [
            paged_attention.IMPLEMENTATIONS[names.attention],
            linear.IMPLEMENTATIONS[names.linear],
        ]
        if self.shapes.model.experts is not None:
            found.append(experts.IMPLEMENTATIONS[names.moe_backend])
        if names.has_decode_kernels:
            found.append(decode_layers.IMPLEMENTATIONS[names.decode_layers])
        return found

    @cached_property
    def _max_fused_tokens(self) -> int:
        return max_fused_tokens(self.names, self.shapes) if self.names is not None else 0

    def _fused(self, num_tokens: int) -> DecodeImplementation | None:
        """Returns the fused layers if a decode step of `num_tokens` tokens runs on them."""
        if self.names is None or num_tokens > self._max_fused_tokens:
            return None
        return decode_layers.IMPLEMENTATIONS[self.names.decode_layers]

    def decode(self, batch: int, context: int) -> Cost:
        """Returns the cost of the layers of a decode step of `batch` requests with `context` tokens each."""
        num_pairs = float(batch * context)
        step = AttentionStep(num_tokens=batch, num_keys=num_pairs, num_pairs=num_pairs, longest=context)
        fused = self._fused(batch)
        if fused is None:
            return self.products(batch) + self.experts(batch) + self.attention(step)
        experts_step = self._expert_step(batch) if self.shapes.model.experts is not None else None
        found = self.shapes.decode_layers()
        return fused.cost(found, self._divided(step), experts_step).times(self.shapes.model.num_layers)

    def products(self, num_tokens: int) -> Cost:
        """Returns the cost of the projections of a step that is not fused, without experts."""
        return _sum(
            self._layer_products(stack, num_tokens).times(len(layers))
            for stack, layers in self.shapes.model.stacks.items()
        )

    def last_mlp(self, num_tokens: int) -> Cost:
        """Returns the cost of the last layer's MLP or experts."""
        model = self.shapes.model
        stack = next(name for name, layers in model.stacks.items() if model.num_layers - 1 in layers)
        if self.shapes.stacks[stack].router is not None:
            return self.experts(num_tokens).times(1 / len(model.stacks[stack]))
        return self._layer_products(stack, num_tokens, ("gate_up", "down"))

    def _layer_products(self, stack: str, num_tokens: int, only: tuple[str, ...] = ()) -> Cost:
        cost = least_product_cost if self.names is None else linear.IMPLEMENTATIONS[self.names.linear].cost
        matrices = self.shapes.projections(stack)
        return _sum(
            cost(matrix, num_tokens, self.shapes.dtype) for name, matrix in matrices.items() if not only or name in only
        )

    def experts(self, num_tokens: int) -> Cost:
        """Returns the cost of the experts of a step, which is none for a model without experts."""
        found = self.shapes.experts
        if found is None:
            return Cost()
        cost = least_expert_cost if self.names is None else experts.IMPLEMENTATIONS[self.names.moe_backend].cost
        return cost(found, self._expert_step(num_tokens)).times(len(self.shapes.model.stacks["layers"]))

    def all_experts_bytes(self) -> float:
        """Returns the bytes of all experts of a device's block."""
        found = self.shapes.experts
        if found is None:
            return 0.0
        return len(self.shapes.model.stacks["layers"]) * found.num_local * found.stored_bytes

    def _expert_step(self, num_tokens: int) -> ExpertStep:
        options = self.shapes.model.experts
        assert options is not None
        load = expert_load(options, self.shapes.layout, num_tokens)
        return ExpertStep(num_tokens, load.num_experts, load.num_choices, options.num_experts)

    def attention(self, step: AttentionStep) -> Cost:
        """Returns the cost of attention of a step that is not fused."""
        cost = (
            least_attention_cost if self.names is None else paged_attention.IMPLEMENTATIONS[self.names.attention].cost
        )
        return cost(self.shapes.attention, self._divided(step)).times(self.shapes.model.num_layers)

    def _divided(self, step: AttentionStep) -> AttentionStep:
        """Returns the step on one of the devices that divide pages: its part of each request's positions."""
        cp = self.shapes.layout.cp
        return step._replace(num_keys=step.num_keys / cp, longest=step.longest / cp)

    def head(self, num_rows: int) -> Cost:
        """Returns the cost of the output head."""
        layout, model = self.shapes.layout, self.shapes.model
        num_weights = layout.vocab_size // layout.num_shards * model.embed_dim
        operations = 2.0 * num_rows * num_weights
        if model.head_quantization is None:
            return Cost(num_bytes=num_weights * self.shapes.dtype.itemsize, operations=operations)
        is_dequantized = self.names is not None and not self.names.has_gpu_decode_kernels
        copied_bytes = 2 * num_weights * self.shapes.dtype.itemsize if is_dequantized else 0
        return Cost(num_bytes=num_weights + copied_bytes, operations=operations)

    def prompt_step(self, num_tokens: int, prompt_tokens: int) -> AttentionStep:
        """Returns what a step of `num_tokens` tokens asks of attention if prompts of a length, or a chunk, fill it."""
        longest = prompt_tokens if num_tokens >= prompt_tokens else (prompt_tokens + num_tokens) / 2  # of a chunk
        num_pairs = num_tokens * prompt_tokens / 2
        return AttentionStep(num_tokens, num_keys=max(num_tokens, longest), num_pairs=num_pairs, longest=longest)

    def prompt_seconds(self, chip: Chip, num_tokens: int, prompt_tokens: int) -> float:
        """Returns how long a step with prompts takes, by the shares of the data sheet that such steps reached."""
        assert self.names is not None
        attention = paged_attention.IMPLEMENTATIONS[self.names.attention]
        parts: list[tuple[Cost, Implementation]] = [
            (self.products(num_tokens), linear.IMPLEMENTATIONS[self.names.linear]),
            (self.experts(num_tokens), experts.IMPLEMENTATIONS[self.names.moe_backend]),
            (self.attention(self.prompt_step(num_tokens, prompt_tokens)), attention),
        ]
        return math.fsum(seconds_on(chip, cost, implementation).total for cost, implementation in parts)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total += cost
    return total
