"""Trains an EAGLE-3 head for the demo model (arXiv 2503.01840), so that draft tokens can be seen on real text.

    python -m meshserve.deploy.demo.train_head --data build/demo-data --output runtime/weights/embedded/demo-head

In: the ids that `train prepare` wrote, and the demo model. Out: a head in the published layout (config.json and
model.safetensors in bfloat16), which `--draft-model` takes.

The head learns the demo model's distributions where it will be asked: the loss of draft token j is taken with the
head's own outputs as the features of the positions before it ("training-time test"), over windows of the training text.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.flax import load_file, save_file

from meshserve.runtime.weights.locate import DEMO_DIRECTORY

from .head_network import EPSILON, LAYERS_READ, PREFIX, HeadSizes, draft_logits
from .network import NetworkConfig, Parameters, forward_with_inputs
from .train import load_splits

_STEP_WEIGHT = 0.8  # weight of the loss of each further draft token
_HELD_OUT_WINDOWS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(HeadSizes):
    """The head's sizes and the training settings; each field is an option."""

    steps: int = 1200
    steps_per_report: int = 100
    draft_tokens: int = 4
    batch_windows: int = 8  # half of them raw play text, half chat
    window_tokens: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 60
    weight_decay: float = 0.1
    seed: int = 0


class Shapes(NamedTuple):
    """What the head has to do with the demo model."""

    served: NetworkConfig
    config: HeadConfig
    token_ids: jax.Array  # [v], the head's vocabulary, ascending


def init_head(key: jax.Array, served: NetworkConfig, config: HeadConfig, embedding: jax.Array) -> dict[str, jax.Array]:
    """Returns float32 parameters under their published names."""
    embed, queries, kv = (
        served.embed_dim,
        config.num_query_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    attention, mlp = f"{PREFIX}self_attn.", f"{PREFIX}mlp."
    matrices = {
        "fc.weight": (embed, len(LAYERS_READ) * embed),
        f"{attention}q_proj.weight": (queries, 2 * embed),
        f"{attention}k_proj.weight": (kv, 2 * embed),
        f"{attention}v_proj.weight": (kv, 2 * embed),
        f"{attention}o_proj.weight": (embed, queries),
        f"{mlp}gate_proj.weight": (config.mlp_dim, embed),
        f"{mlp}up_proj.weight": (config.mlp_dim, embed),
        f"{mlp}down_proj.weight": (embed, config.mlp_dim),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    parameters = {f"{PREFIX}{name}.weight": jnp.ones(embed) for name in norms} | {"norm.weight": jnp.ones(embed)}
    for (name, shape), its_key in zip(matrices.items(), jax.random.split(key, len(matrices)), strict=True):
        parameters[name] = shape[1] ** -0.5 * jax.random.normal(its_key, shape)
    return parameters | {"lm_head.weight": embedding}


class Measures(NamedTuple):
    """Means over positions, for each draft token [N], if all before it are those of the text."""

    losses: jax.Array  # cross entropy with the demo model's distribution within the head's vocabulary, in nats
    overlap: jax.Array  # the sum over all tokens of the smaller probability
    agreement: jax.Array  # the most likely tokens are the same


def measures(head: Parameters, served: Parameters, ids: jax.Array, shapes: Shapes) -> Measures:
    """Compares the head with the demo model on windows of ids [B, T]."""
    logits, inputs = forward_with_inputs(served, ids, shapes.served)
    states, embedded = [inputs[layer] for layer in LAYERS_READ], served["model.embed_tokens.weight"][ids]
    num_drafts = shapes.config.draft_tokens
    drafted = draft_logits(head, states, embedded, shapes.config, num_drafts)
    found = []
    for step, mine in enumerate(drafted):
        target = logits[:, step + 1 : step + 1 + mine.shape[1]]
        within = target[..., shapes.token_ids]
        share = jnp.exp(jax.nn.logsumexp(within, axis=-1) - jax.nn.logsumexp(target, axis=-1))  # in the vocabulary
        p, log_q = jax.nn.softmax(within, axis=-1), jax.nn.log_softmax(mine, axis=-1)
        loss = -(share * (p * log_q).sum(axis=-1)).mean()
        overlap = jnp.minimum(p * share[..., None], jnp.exp(log_q)).sum(axis=-1).mean()
        agreement = (shapes.token_ids[mine.argmax(axis=-1)] == target.argmax(axis=-1)).mean()
        found.append((loss, overlap, agreement))
    return Measures(*(jnp.stack(values) for values in zip(*found, strict=True)))


def train(data: Path, model: Path, output: Path, config: HeadConfig) -> None:
    """Trains and exports; prints one JSON object per report, measured on the plays that were held out."""
    served_config = NetworkConfig()
    served = {name: value.astype(jnp.float32) for name, value in load_file(model / "model.safetensors").items()}
    training, held_out = load_splits(data)
    counts = np.bincount(np.concatenate([training.raw, training.chat]), minlength=served_config.vocabulary_tokens)
    token_ids = np.sort(np.argsort(-counts, kind="stable")[: config.vocabulary_tokens])
    shapes = Shapes(served_config, config, jnp.asarray(token_ids))
    key, init_key = jax.random.split(jax.random.key(config.seed))
    embedding = served["model.embed_tokens.weight"][token_ids]
    head: Parameters = init_head(init_key, served_config, config, embedding)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup_steps, config.steps)
    is_matrix = functools.partial(jax.tree.map, lambda value: value.ndim > 1)
    adam = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    step_weights = _STEP_WEIGHT ** jnp.arange(config.draft_tokens)

    def loss(head: Parameters, ids: jax.Array) -> jax.Array:
        return (measures(head, served, ids, shapes).losses * step_weights).sum() / step_weights.sum()

    @jax.jit
    def update(head: Parameters, state: optax.OptState, ids: jax.Array) -> tuple[Parameters, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(head, ids)
        updates, state = optimizer.update(gradients, state, head)
        return optax.apply_updates(head, updates), state, value

    evaluate = jax.jit(lambda head, ids: measures(head, served, ids, shapes))
    rng = np.random.default_rng(config.seed)
    tests = _windows(np.random.default_rng(1), held_out.raw, held_out.chat, _HELD_OUT_WINDOWS, config)
    state, losses, started = optimizer.init(head), [], time.perf_counter()
    for step in range(1, config.steps + 1):
        ids = _windows(rng, training.raw, training.chat, config.batch_windows, config)
        head, state, value = update(head, state, ids)
        losses.append(value)
        if step % config.steps_per_report == 0 or step == config.steps:
            found = evaluate(head, tests)
            record = {name: [round(float(x), 4) for x in values] for name, values in found._asdict().items()}
            mean = round(float(jnp.stack(losses).mean()), 4)
            print(
                json.dumps({"step": step, "seconds": round(time.perf_counter() - started, 1), "loss": mean} | record),
                flush=True,
            )
            losses.clear()
            export_head(output, head, shapes)


def _windows(rng: np.random.Generator, raw: np.ndarray, chat: np.ndarray, count: int, config: HeadConfig) -> np.ndarray:
    """Returns random windows [count, window_tokens] int32, half of them of each."""
    found = []
    for ids, number in ((raw, count // 2), (chat, count - count // 2)):
        starts = rng.integers(0, ids.size - config.window_tokens, number)
        found.append(ids[starts[:, None] + np.arange(config.window_tokens)])
    return np.concatenate(found).astype(np.int32)


def export_head(folder: Path, head: Parameters, shapes: Shapes) -> None:
    """Writes the head; parameters are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    served, config, token_ids = shapes
    tensors = {name: jnp.asarray(value, jnp.bfloat16) for name, value in head.items()}
    tensors["d2t"] = jnp.asarray(token_ids - jnp.arange(len(token_ids)), jnp.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(head_config(served, config), indent=2) + "\n")


def head_config(served: NetworkConfig, config: HeadConfig) -> Mapping[str, object]:
    """Returns the contents of the head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": served.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": served.max_context_tokens,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": served.vocabulary_tokens,
        "draft_vocab_size": config.vocabulary_tokens,
        # Named by the layers whose outputs are read.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS_READ]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that `train prepare` wrote")
    parser.add_argument("--model", type=Path, default=DEMO_DIRECTORY, help="the demo model")
    parser.add_argument("--output", type=Path, required=True)
    for option in dataclasses.fields(HeadConfig):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=option.type, default=option.default)
    arguments = parser.parse_args()
    values = {option.name: getattr(arguments, option.name) for option in dataclasses.fields(HeadConfig)}
    train(arguments.data, arguments.model, arguments.output, HeadConfig(**values))


if __name__ == "__main__":
    main()
