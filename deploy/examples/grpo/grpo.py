"""GRPO in plain JAX: the demo model learns to say words that begin with "s". meshserve samples, in the same process.

    python -m meshserve.deploy.examples.grpo.grpo --seeds 0 1 2

A step samples a group of continuations of each prompt, rewards each by a rule that anybody can check, and makes those
more likely that are better than the others of their group (https://arxiv.org/abs/2402.03300).
"""

import argparse
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshserve import LLM, SamplingParams
from meshserve.deploy.demo.export import load_parameters
from meshserve.deploy.demo.network import NetworkConfig, Parameters, forward, token_losses
from meshserve.runtime.weights.locate import DEMO_DIRECTORY

PROMPTS = [f"{name}:\n" for name in ("ROMEO", "JULIET", "HAMLET", "PORTIA")]
GROUP, TOKENS, LEARNING_RATE, CLIP = 8, 16, 3e-4, 0.2
LENGTH = 32  # of a prompt and its output, padded
OPTIMIZER = optax.adam(LEARNING_RATE)


def reward(text: str) -> float:
    """Returns the share of the words that begin with an "s"."""
    words = re.findall(r"[a-z']+", text.lower())
    return sum(word[0] == "s" for word in words) / max(len(words), 1)


def loss(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    """The clipped objective. `sampled` are the log-probabilities of the sampler, which had the same weights."""
    logprobs = -token_losses(forward(parameters, batch["ids"][:, :-1], NetworkConfig()), batch["ids"][:, 1:])
    ratio = jnp.exp(logprobs - batch["sampled"][:, 1:])
    advantages = batch["advantages"][:, None]
    gains = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -(gains * batch["is_output"][:, 1:]).sum() / batch["is_output"].sum()


@jax.jit
def update(parameters: Parameters, state: optax.OptState, batch: dict[str, jax.Array]) -> tuple:
    changes, state = OPTIMIZER.update(jax.grad(loss)(parameters, batch), state, parameters)
    return optax.apply_updates(parameters, changes), state


def rollouts(llm: LLM, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """Samples a group for each prompt. Returns the batch to learn from, and the mean reward."""
    params = SamplingParams(n=GROUP, max_tokens=TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, seed=seed)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    rewards = np.array([[reward(sample.text) for sample in output.outputs] for output in outputs])
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-6)
    ids, sampled = np.zeros((rewards.size, LENGTH), np.int32), np.zeros((rewards.size, LENGTH), np.float32)
    is_output = np.zeros((rewards.size, LENGTH), bool)
    samples = [(output.prompt_token_ids, sample) for output in outputs for sample in output.outputs]
    for row, (prompt, sample) in enumerate(samples):
        place = slice(len(prompt), len(prompt) + len(sample.token_ids))
        ids[row, : place.stop], is_output[row, place] = (*prompt, *sample.token_ids), True
        chosen = zip(sample.logprobs or (), sample.token_ids, strict=True)
        sampled[row, place] = [position[token].logprob for position, token in chosen]
    batch = {"ids": ids, "sampled": sampled, "is_output": is_output, "advantages": advantages.reshape(-1)}
    return batch, float(rewards.mean())


def train(llm: LLM, seed: int, num_steps: int) -> list[float]:
    """Trains the demo model from its published weights. Returns the mean reward of each step."""
    parameters, rewards = load_parameters(DEMO_DIRECTORY), []
    state = OPTIMIZER.init(parameters)
    for step in range(num_steps):
        llm.update_weights(parameters, version=f"seed {seed}, step {step}")  # device to device
        batch, mean = rollouts(llm, seed=1_000_000 * seed + 1_000 * step)
        parameters, state = update(parameters, state, batch)
        rewards.append(mean)
        print(json.dumps({"seed": seed, "step": step, "reward": round(mean, 4)}), flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the demo model with GRPO.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with LLM(
        "demo", cpu_devices=1, dtype="float32", max_context=64, max_running=32, max_step_tokens=32, show_progress=False
    ) as llm:
        for seed in options.seeds:
            train(llm, seed, options.steps)
