"""Computes the minimum time of steps from what the chosen kernels read and compute, and the data sheet of the device.

With kernels that read everything once, a decode step reads every weight, except an untied embedding and experts that no
token chose, and each request's keys and values. Other kernels say what they read and write beyond that (`cost` in
`kernels`), and what the host launches one by one. The times assume perfect overlap, and no other cost of launches and
the host. The time of all-reduces is estimated separately and added: some microseconds for each of two all-reduces per
layer and one for the embedding, and the transfer of the bytes over the links.
"""

import dataclasses

from meshserve.kernels import linear, p2p, paged_attention
from meshserve.kernels.implementation import Cost
from meshserve.kernels.paged_attention import AttentionStep
from meshserve.sharding.chips import Chip

from ..resolve.kernel_costs import KernelCosts, seconds_on
from ..resolve.kernel_names import KernelNames
from ..resolve.kernel_shapes import KernelShapes

# Time of an all-reduce of few bytes within a host, measured on four H200 (docs/performance.md) and guessed for TPUs and
# for GPUs without NVLink.
_XLA_ALL_REDUCE_SECONDS = {"gpu": 18e-6, "tpu": 10e-6}
_PCIE_ALL_REDUCE_SECONDS = 30e-6
_RESTORED_BYTES_PER_SECOND = 42e9  # from host memory to a first token, on an H100 (docs/log/scheduler.md)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roof:
    """The roofline of a decode step, or of the prefill of a prompt, on all devices of a mesh."""

    num_tokens: int  # decoded tokens, or tokens of the prompt
    context: int  # tokens of each request in the cache
    seconds: float  # without the all-reduces
    all_reduce_seconds: float  # estimated
    bound: str  # "memory", "compute" or "launches"

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total_seconds

    @property
    def total_seconds(self) -> float:
        return self.seconds + self.all_reduce_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstToken:
    """The predicted time of a lone prompt to its first token."""

    num_tokens: int
    computed_seconds: float
    restored_seconds: float  # if its prefix comes from host memory instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The roofline of a model at a TP size on a kind of device.

    Attributes:
      shapes: The model's on each device.
      chip: The device.
      names: The chosen kernels. None: kernels that take the least.
      has_p2p: Whether the devices use the P2P all-reduce.
    """

    shapes: KernelShapes
    chip: Chip
    names: KernelNames | None = None
    has_p2p: bool = False

    @property
    def _costs(self) -> KernelCosts:
        return KernelCosts(shapes=self.shapes, names=self.names)

    @property
    def _least(self) -> KernelCosts:
        return KernelCosts(shapes=self.shapes)

    @property
    def is_measured(self) -> bool:
        """Whether the speed of all its kernels was measured on this chip."""
        return all(self.chip.name in each.measured_on for each in self._costs.used)

    @property
    def weight_bytes(self) -> float:
        """The bytes of weights that each device reads in a step, if it reads all of its experts."""
        least = self._least
        return least.products(1).num_bytes + least.head(1).num_bytes + least.all_experts_bytes()

    def read_weight_bytes(self, num_tokens: int) -> float:
        """Returns the bytes of weights that the device with the most reads in a step of `num_tokens` tokens."""
        least = self._least
        return least.products(1).num_bytes + least.head(1).num_bytes + least.experts(num_tokens).num_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values on each device, on average."""
        return self.shapes.model.num_layers * self.shapes.attention.key_bytes // self.shapes.layout.cp

    def decode(self, batch: int, context: int) -> Roof:
        """Returns the roofline of a decode step of `batch` requests with `context` tokens each."""
        cost = self._costs.decode(batch, context) + self._costs.head(batch)
        return self._roof(batch, context, cost, num_steps=1)

    def prefill(self, num_tokens: int, step_tokens: int) -> Roof:
        """Returns the roofline of the prefill of one prompt, with `step_tokens` tokens per step.

        Each chunk reads the weights and the keys and values of the chunks before it. The last layer's MLP is computed
        for the last token only.
        """
        costs, num_steps = self._costs, -(-num_tokens // step_tokens)
        step_tokens = -(-num_tokens // num_steps)
        cost = costs.products(step_tokens) + costs.experts(step_tokens) + costs.head(1)
        cost = (cost + costs.attention(_mean_chunk(num_tokens, num_steps))).times(num_steps)
        cost = _without_operations(cost, costs.last_mlp(num_tokens))
        return self._roof(num_tokens, num_tokens, cost, num_steps=num_steps)

    def first_token(self, num_tokens: int, step_tokens: int) -> FirstToken | None:
        """Predicts when one prompt gets its first token, with `step_tokens` tokens per step, and nothing else running.

        Returns None where nothing was measured that could predict it: on chips on which the chosen kernels were not
        measured, on several of them, and for quantized models and models with experts.
        """
        shapes, names = self.shapes, self.names
        is_like_measured = self.is_measured and shapes.layout.num_shards == 1 and shapes.dtype.itemsize == 2
        if not is_like_measured or names is None or shapes.is_quantized or shapes.model.experts is not None:
            return None
        num_steps = -(-num_tokens // step_tokens)
        attention = self._costs.attention(_mean_chunk(num_tokens, num_steps)).times(num_steps)
        products = _without_operations(self._costs.products(num_tokens), self._costs.last_mlp(num_tokens))
        seconds = seconds_on(self.chip, products, linear.IMPLEMENTATIONS[names.linear]).compute
        seconds += seconds_on(self.chip, attention, paged_attention.IMPLEMENTATIONS[names.attention]).compute
        return FirstToken(
            num_tokens=num_tokens,
            computed_seconds=max(seconds, self.prefill(num_tokens, step_tokens).total_seconds),
            restored_seconds=num_tokens * self.token_bytes / _RESTORED_BYTES_PER_SECOND
            + self.decode(1, num_tokens).total_seconds,
        )

    def pooling(self, num_tokens: int, step_tokens: int) -> Roof:
        """Returns the roofline of a full step of prompts of `num_tokens` tokens each, as embedding models compute them.

        Longer prompts take several steps: see `prefill`. The output head is not read.
        """
        if num_tokens >= step_tokens:
            return self.prefill(num_tokens, step_tokens)
        costs, num_prompts = self._costs, step_tokens // num_tokens
        total = num_prompts * num_tokens
        cost = costs.products(total) + costs.experts(total) + costs.attention(costs.prompt_step(total, num_tokens))
        cost = _without_operations(cost, costs.last_mlp(total - num_prompts))
        return self._roof(total, num_tokens, cost, num_steps=1)

    def _roof(self, num_tokens: int, context: int, cost: Cost, *, num_steps: int) -> Roof:
        seconds = seconds_on(self.chip, cost)
        return Roof(
            num_tokens=num_tokens,
            context=context,
            seconds=seconds.total,
            all_reduce_seconds=self._all_reduce_seconds(num_tokens, num_steps),
            bound=seconds.bound,
        )

    def _all_reduce_seconds(self, num_tokens: int, num_steps: int) -> float:
        model, num_shards = self.shapes.model, self.shapes.layout.num_shards
        if num_shards == 1:
            return 0.0
        num_all_reduces = 2 * model.num_layers + 1
        sent_bytes = 2 * (num_shards - 1) / num_shards * num_tokens * model.embed_dim * self.shapes.dtype.itemsize
        seconds = num_steps * self._small_all_reduce_seconds
        all_reduces = num_all_reduces * (seconds + sent_bytes / self.chip.link_bytes_per_second)
        return all_reduces + self._exchange_seconds(num_tokens, num_steps)

    @property
    def _small_all_reduce_seconds(self) -> float:
        """The time of an all-reduce of few bytes."""
        if self.chip.platform == "gpu" and not self.chip.has_nvlink:
            return _PCIE_ALL_REDUCE_SECONDS
        return p2p.IMPLEMENTATIONS["p2p"].seconds if self.has_p2p else _XLA_ALL_REDUCE_SECONDS[self.chip.platform]

    def _exchange_seconds(self, num_tokens: int, num_steps: int) -> float:
        """Returns the time in which devices that divide pages gather queries and exchange results, in all layers."""
        model, layout = self.shapes.model, self.shapes.layout
        if layout.cp == 1:
            return 0.0
        heads = layout.group_size * (layout.cp - 1) * num_tokens
        sent_bytes = heads * (2 * model.head_dim * self.shapes.dtype.itemsize + 4)
        seconds = 2 * num_steps * _XLA_ALL_REDUCE_SECONDS[self.chip.platform]
        return model.num_layers * (seconds + sent_bytes / self.chip.link_bytes_per_second)


def _mean_chunk(num_tokens: int, num_steps: int) -> AttentionStep:
    """Returns what the chunks of a prompt ask of attention on average."""
    step_tokens = -(-num_tokens // num_steps)
    num_pairs = num_tokens * num_tokens / 2 / num_steps
    return AttentionStep(
        step_tokens, num_keys=num_tokens / 2, num_pairs=num_pairs, longest=(num_tokens + step_tokens) / 2
    )


def _without_operations(cost: Cost, part: Cost) -> Cost:
    """Returns a cost without the operations of a part."""
    return dataclasses.replace(
        cost,
        operations=cost.operations - part.operations,
        fp8_operations=cost.fp8_operations - part.fp8_operations,
        float32_operations=cost.float32_operations - part.float32_operations,
    )
