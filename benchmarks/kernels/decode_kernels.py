"""Times the kernels of a decode step with random weights at the shapes of real models, on one GPU.

    python -m meshserve.benchmarks.kernels.decode_kernels --model qwen3-8b --batch 1 32 128 --what step stack parts
    python -m meshserve.benchmarks.kernels.decode_kernels --model qwen3-32b --tp 4 --batch 32 --what stack splits

step       embedding, all layers, final norm, head, argmax; the token is fed back on the device
stack      all layers, in one call
splits     the same with every number of ranges that a projection can be split into, one projection at a time
parts      each projection as a separate call, as on a mesh: a sequence of L calls; not of a model with experts

--weights times quantised weights, in the formats of the tests' cases.

With --tp N the shapes are those of one shard of N, alone, without all-reduces over a mesh.

With --first-context, one request of each batch has a different length from the others. With --max-context, the page
tables have room for more tokens than any request has, as a server's have.

For attention alone, see `meshserve bench kernels`.

Every figure is measured over a sequence of steps that the device runs without waiting for the host; median, P10 and P90
are over rounds of such sequences. Bytes are what the step must read: weights once, pages once. The roofline is
--bandwidth (TB/s).
"""

import argparse
import dataclasses
import functools
import gc
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.timing import random_array, timed_ms
from meshserve.kernels import decode_layers as kernels
from meshserve.kernels.decode_layers import DecodeBatch, LayerSettings, LayerWeights, cases, gpu, reference
from meshserve.kernels.linear import FP8, Matrix, QuantisedMatrix

SETTINGS = LayerSettings(epsilon=1e-6, softmax_scale=128**-0.5, num_chosen=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    layers: int
    embed: int
    kv_heads: int
    group: int
    head_dim: int
    mlp: int
    vocab: int = 151936
    num_experts: int = 0  # in place of the MLP; `mlp` is the size of one, and a token goes through 8
    weights: str = "bfloat16"  # or one of `cases.FORMATS`

    @property
    def q_columns(self) -> int:
        return self.kv_heads * self.group * self.head_dim

    def shard(self, tp: int, layers: int, weights: str) -> "Model":
        """Returns one of `tp` shards, where `tp` must divide the KV heads; `layers` limits the number of layers."""
        if self.kv_heads % tp or self.mlp % (64 * tp):
            raise SystemExit(
                f"--tp {tp} must divide {self.kv_heads} KV heads, and an MLP of {self.mlp} in blocks of 64"
            )
        return dataclasses.replace(
            self,
            layers=layers or self.layers,
            kv_heads=self.kv_heads // tp,
            mlp=self.mlp // tp,
            vocab=self.vocab // tp,
            weights=weights,
        )

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the matrices of one layer."""
        experts = (self.num_experts,) if self.num_experts else ()
        return {
            "qkv": (self.kv_heads, (self.group + 2) * self.head_dim, self.embed),
            "o": (self.embed, self.q_columns),
            "gate_up": (*experts, 2, self.mlp, self.embed),
            "down": (*experts, self.embed, self.mlp),
        }

    def read_bytes(self, batch: int) -> float:
        """Returns the weight bytes that a layer reads: each expert once that a token is expected to choose."""
        part_bytes = self.part_bytes()
        if not self.num_experts:
            return sum(part_bytes.values())
        share = 1 - (1 - SETTINGS.num_chosen / self.num_experts) ** batch
        router = 2 * self.num_experts * self.embed
        return part_bytes["qkv"] + part_bytes["o"] + router + share * (part_bytes["gate_up"] + part_bytes["down"])

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a quantised matrix's scales."""
        _, (rows, columns), _, _ = cases.FORMATS[self.weights]
        return (*shape[:-2], shape[-2] // math.gcd(rows, shape[-2]), shape[-1] // math.gcd(columns, shape[-1]))

    def part_bytes(self) -> dict[str, int]:
        """Returns the weight bytes of each projection of one layer."""
        if self.weights == "bfloat16":
            return {part: 2 * math.prod(shape) for part, shape in self.part_shapes().items()}
        is_int4, _, dtype, has_zero = cases.FORMATS[self.weights]
        per_scale = jnp.dtype(dtype).itemsize + has_zero
        return {
            part: math.prod(shape) // (2 if is_int4 else 1) + math.prod(self.grid(shape)) * per_scale
            for part, shape in self.part_shapes().items()
        }

    def page_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of one layer's keys and values."""
        return num_tokens * self.kv_heads * self.head_dim * 4


MODELS = {
    "qwen3-0.6b": Model(layers=28, embed=1024, kv_heads=8, group=2, head_dim=128, mlp=3072),
    "qwen3-1.7b": Model(layers=28, embed=2048, kv_heads=8, group=2, head_dim=128, mlp=6144),
    "qwen3-4b": Model(layers=36, embed=2560, kv_heads=8, group=4, head_dim=128, mlp=9728),
    "qwen3-8b": Model(layers=36, embed=4096, kv_heads=8, group=4, head_dim=128, mlp=12288),
    "qwen3-14b": Model(layers=40, embed=5120, kv_heads=8, group=5, head_dim=128, mlp=17408),
    "qwen3-32b": Model(layers=64, embed=5120, kv_heads=8, group=8, head_dim=128, mlp=25600),
    "qwen3-30b-a3b": Model(layers=48, embed=2048, kv_heads=4, group=8, head_dim=128, mlp=768, num_experts=128),
}


def random_matrix(model: Model, part: str, seed: int) -> Matrix:
    """Returns a projection of all layers."""
    shape = (model.layers, *model.part_shapes()[part])
    if model.weights == "bfloat16":
        return random_array(shape, seed)
    is_int4, _, dtype, has_zero = cases.FORMATS[model.weights]
    grid = model.grid(shape)
    scale = jnp.full(grid, 2**-8 if is_int4 else 2**-5, dtype)
    if not is_int4:  # numbers below 2
        bits = random_bytes(shape, seed) & jnp.uint8(0xBF)
        return QuantisedMatrix(jax.lax.bitcast_convert_type(bits, FP8), scale)
    data = random_bytes((*shape[:-1], shape[-1] // 2), seed)
    return QuantisedMatrix(data, scale, jnp.full(grid, 8, jnp.uint8) if has_zero else None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_bytes(shape: tuple[int, ...], seed: int) -> jax.Array:
    _, bits = jax.lax.rng_bit_generator(jnp.array([seed, 1, 2, 3], jnp.uint32), shape, jnp.uint8)
    return bits


def random_weights(model: Model) -> LayerWeights:
    m, n = model, model.layers
    return LayerWeights(
        input_norm=jnp.ones((n, m.embed), jnp.bfloat16),
        qkv=random_matrix(m, "qkv", 1),
        q_norm=jnp.ones((n, m.head_dim), jnp.bfloat16),
        k_norm=jnp.ones((n, m.head_dim), jnp.bfloat16),
        o=random_matrix(m, "o", 2),
        post_norm=jnp.ones((n, m.embed), jnp.bfloat16),
        gate_up=random_matrix(m, "gate_up", 3),
        down=random_matrix(m, "down", 4),
        router=random_array((n, m.num_experts, m.embed), 9) if m.num_experts else None,
    )


def random_cache(
    model: Model, layers: int, lengths: Sequence[int], page_size: int, max_context: int = 0
) -> tuple[jax.Array, DecodeBatch]:
    """Returns a random cache and the batch of requests with the given lengths, on pages in random order.

    A request's length includes its current token. The page table [B, pages] has room for `max_context` tokens, or for
    the longest request.
    """
    num_pages = [-(-length // page_size) for length in lengths]
    table = np.zeros((len(lengths), -(-max(*lengths, max_context) // page_size)), np.int32)
    pages = np.random.default_rng(0).permutation(sum(num_pages))
    for row, own in zip(table, np.split(pages, np.cumsum(num_pages)[:-1]), strict=True):
        row[: len(own)] = own
    cache = random_array((layers, len(pages), model.kv_heads, 2, page_size, model.head_dim), 5)
    positions = jnp.asarray(lengths, jnp.int32) - 1
    return cache, DecodeBatch(positions=positions, page_table=jnp.asarray(table))


class Bench:
    """The weights of one model, and the rows measured so far."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self.model = MODELS[name].shard(arguments.tp, arguments.layers, arguments.weights)
        self.rows: list[dict[str, Any]] = []
        self.frequencies = jnp.asarray(
            1e6 ** (-np.arange(0, self.model.head_dim, 2) / self.model.head_dim), jnp.float32
        )

    @functools.cached_property
    def weights(self) -> LayerWeights:
        return random_weights(self.model)

    @functools.cached_property
    def embedding(self) -> jax.Array:
        return random_array((self.model.vocab, self.model.embed), 6)

    def record(self, what: str, batch: int, context: int, num_bytes: int, figures: list[float], **more: Any) -> None:
        median, p10, p90 = (float(np.percentile(figures, q)) for q in (50, 10, 90))
        bandwidth = num_bytes / median / 1e9
        row = {
            "model": self.name, "tp": self.arguments.tp, "weights": self.model.weights, "what": what,
            "batch": batch, "context": context,
            "ms": median, "p10": p10, "p90": p90,
            "bytes": num_bytes, "tb_per_s": bandwidth, "of_roofline": bandwidth / self.arguments.bandwidth,
            "page_size": self.arguments.page_size, "device": jax.devices()[0].device_kind, **more,
        }  # fmt: skip
        self.rows.append(row)
        print(
            f"{self.name:11} tp {self.arguments.tp} {self.model.weights} {what:18} batch {batch:4} context {context:6}"
            f"  {median:8.4f} ms  (P10 {p10:.4f}, P90 {p90:.4f})  {bandwidth:5.3f} TB/s"
            f"  {100 * row['of_roofline']:5.1f} %" + "".join(f"  {key} {value}" for key, value in more.items()),
            flush=True,
        )

    def lengths(self, batch: int, context: int) -> list[int]:
        return [self.arguments.first_context or context] + [context] * (batch - 1)

    def random_cache(self, batch: int, context: int) -> tuple[jax.Array, DecodeBatch]:
        arguments, lengths = self.arguments, self.lengths(batch, context)
        return random_cache(self.model, self.model.layers, lengths, arguments.page_size, arguments.max_context)

    def layer_bytes(self, batch: int, context: int) -> int:
        model, num_tokens = self.model, sum(self.lengths(batch, context))
        return round(model.layers * (model.read_bytes(batch) + model.page_bytes(num_tokens)))

    def time(self, run: Callable[[Any], Any], state: Any, per_state: int = 1) -> list[float]:
        figures, _ = timed_ms(run, state, per_state, self.arguments.rounds, self.arguments.seconds)
        del state, _
        gc.collect()  # frees the cache, most of the memory, before the next one is allocated
        return figures

    def stack(self, batch: int, context: int, launch: gpu.LaunchShape = gpu.CHOSEN, **more: Any) -> None:
        cache, where = self.random_cache(batch, context)
        x = random_array((batch, self.model.embed), 7)

        @functools.partial(jax.jit, donate_argnums=1)
        def run(weights: LayerWeights, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return gpu.decode_layers(x, weights, cache, where, self.frequencies, settings=SETTINGS, launch=launch)[:2]

        figures = self.time(lambda state: run(self.weights, state[1], x), (x, cache))
        self.record("stack", batch, context, self.layer_bytes(batch, context), figures, **more)

    def splits(self, batch: int, context: int) -> None:
        for part in ("qkv", "o") if self.model.num_experts else self.model.part_bytes():
            for num in range(1, 9):
                self.stack(batch, context, gpu.LaunchShape(**{f"{part}_splits": num}), **{part: num})

    def step(self, batch: int, context: int) -> None:
        cache, where = self.random_cache(batch, context)
        implementation = kernels.implementation(self.arguments.implementation)

        @functools.partial(jax.jit, donate_argnums=3)
        def run(
            weights: LayerWeights, embedding: jax.Array, tokens: jax.Array, cache: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            x, cache, _ = implementation.decode_layers(
                embedding[tokens], weights, cache, where, self.frequencies, settings=SETTINGS
            )
            x = reference.rms_norm(x, jnp.ones(self.model.embed, jnp.bfloat16), SETTINGS.epsilon)
            logits = jnp.einsum("bd,vd->bv", x, embedding, preferred_element_type=jnp.float32)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        tokens = jnp.arange(batch, dtype=jnp.int32)
        figures = self.time(lambda state: run(self.weights, self.embedding, *state), (tokens, cache))
        num_bytes = self.layer_bytes(batch, context) + 2 * self.embedding.size
        self.record("step", batch, context, num_bytes, figures)

    def logits(self, batch: int) -> None:
        x = random_array((batch, self.model.embed), 7)

        @jax.jit
        def run(embedding: jax.Array, x: jax.Array) -> jax.Array:
            for _ in range(4):
                x = reference.rms_norm(x, jnp.ones(self.model.embed, jnp.bfloat16), SETTINGS.epsilon)
                logits = jnp.einsum("bd,vd->bv", x, embedding, preferred_element_type=jnp.float32)
                x = embedding[jnp.argmax(logits, axis=-1)]
            return x

        self.record("logits", batch, 0, 2 * self.embedding.size, self.time(lambda x: run(self.embedding, x), x, 4))

    def parts(self, batch: int) -> None:
        """Times sequences of one projection over the layers; each output feeds the next call through a narrow sum."""
        model = self.model
        if model.num_experts:
            raise SystemExit(f"--what parts: {self.name} has experts")
        cache, where = random_cache(model, model.layers, [1] * batch, self.arguments.page_size)
        inputs = {"qkv": model.embed, "o": model.q_columns, "gate_up": model.embed, "down": model.mlp}

        def call(part: str, x: jax.Array, weights: LayerWeights, layer: int) -> jax.Array:
            if part == "gate_up":
                return gpu.gate_up(x, weights, settings=SETTINGS, layer=layer)
            return (gpu.output if part == "o" else gpu.down)(x, weights, None, layer=layer)

        for part, num_bytes in model.part_bytes().items():

            @functools.partial(jax.jit, donate_argnums=1)
            def run(
                weights: LayerWeights, state: tuple[jax.Array, jax.Array], part: str = part
            ) -> tuple[jax.Array, jax.Array]:
                x, cache = state
                for layer in range(model.layers):
                    if part == "qkv":
                        out, cache = gpu.qkv(x, weights, cache, where, self.frequencies, settings=SETTINGS, layer=layer)
                    else:
                        out = call(part, x, weights, layer)
                    x = x + out.reshape(batch, -1)[:, :1] * jnp.bfloat16(1e-3)
                return x, cache

            x = random_array((batch, inputs[part]), 8)
            figures, (_, cache) = timed_ms(
                functools.partial(run, self.weights),
                (x, cache),
                model.layers,
                self.arguments.rounds,
                self.arguments.seconds,
            )
            self.record(part, batch, 0, num_bytes, figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--what", nargs="+", choices=("step", "stack", "splits", "parts", "logits"), default=["step"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument(
        "--context", nargs="+", type=int, default=[1024], help="context length of every request, in tokens"
    )
    parser.add_argument(
        "--first-context", type=int, default=0, help="context length of one request of each batch, instead of --context"
    )
    parser.add_argument(
        "--max-context", type=int, default=0, help="capacity of the page tables in tokens, 0 for what the requests need"
    )
    parser.add_argument("--tp", type=int, default=1, help="time one shard of this many")
    parser.add_argument("--weights", choices=("bfloat16", *cases.FORMATS), default="bfloat16", help="format of weights")
    parser.add_argument("--layers", type=int, default=0, help="number of layers of each model, 0 for all")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--implementation", default="cuda", help="implementation of the step's layers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time per figure")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="the roofline's memory bandwidth, TB/s")
    parser.add_argument("--json", help="file to write the rows to")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.model:
        bench = Bench(name, options)
        for what in options.what:
            for batch in options.batch:
                if what in ("parts", "logits"):
                    getattr(bench, what)(batch)
                    continue
                for context in options.context:
                    getattr(bench, what)(batch, context)
        rows += bench.rows
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
