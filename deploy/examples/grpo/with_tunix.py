"""The same with Tunix (google-tunix 0.1.7): its GRPO learner samples with its own sampler, or with meshserve.

pip install google-tunix
python -m meshserve.deploy.examples.grpo.with_tunix --rollouts vanilla meshserve --seeds 0 1 2
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import AutoTokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from meshserve import LLM
from meshserve.deploy.demo.network import RMS_NORM_EPSILON, NetworkConfig
from meshserve.deploy.examples.grpo.grpo import CLIP, GROUP, LEARNING_RATE, PROMPTS, TOKENS, reward
from meshserve.integrations.tunix import MeshserveRollout
from meshserve.runtime.weights.locate import DEMO_DIRECTORY

PROMPT_TOKENS = 16  # prompts are padded to these


def demo_actor(mesh: jax.sharding.Mesh) -> qwen3.Qwen3:
    """Returns the demo model as Tunix trains it."""
    sizes = NetworkConfig()
    config = qwen3.ModelConfig(
        num_layers=sizes.num_layers, vocab_size=sizes.vocabulary_tokens, embed_dim=sizes.embed_dim,
        hidden_dim=sizes.mlp_dim, num_heads=sizes.num_query_heads, head_dim=sizes.head_dim,
        num_kv_heads=sizes.num_kv_heads, rope_theta=int(sizes.rope_theta), norm_eps=RMS_NORM_EPSILON,
        use_tied_embedding=True,
    )  # fmt: skip
    return create_model_from_safe_tensors(str(DEMO_DIRECTORY), config, mesh, dtype=jnp.float32)


def train(rollout: str, llm: LLM, seed: int, num_steps: int) -> list[dict[str, float]]:
    """Trains with Tunix's learner. Returns the mean reward of each step, and the seconds since the first one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    engine = {"vanilla": "vanilla", "meshserve": functools.partial(MeshserveRollout, llm=llm)}[rollout]
    cluster = RLCluster(
        actor=demo_actor(mesh),
        tokenizer=AutoTokenizer.from_pretrained(DEMO_DIRECTORY),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(LEARNING_RATE), eval_every_n_steps=num_steps + 1, max_steps=num_steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=TOKENS,
                max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=PROMPT_TOKENS + TOKENS,
                temperature=1.0,
                seed=seed,
            ),  # fmt: skip
        ),
    )
    rows: list[dict[str, float]] = []
    started = time.monotonic()

    def rewards(prompts: list[str], completions: list[str], **more: object) -> list[float]:
        found = [reward(text) for text in completions]
        rows.append({"reward": float(np.mean(found)), "seconds": time.monotonic() - started})
        print(json.dumps({"rollout": rollout, "seed": seed, "step": len(rows) - 1, **rows[-1]}), flush=True)
        return found

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(num_steps):
            yield {"prompts": np.array(PROMPTS)}

    config = GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0, epsilon=CLIP)
    GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=rewards).train(list(batches()))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the demo model with Tunix's GRPO learner.")
    parser.add_argument("--rollouts", nargs="+", choices=["vanilla", "meshserve"], default=["vanilla", "meshserve"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with LLM(
        "demo", cpu_devices=1, dtype="float32", max_context=64, max_running=32, max_step_tokens=32, show_progress=False
    ) as llm:
        for seed in options.seeds:
            for rollout in options.rollouts:
                train(rollout, llm, seed, options.steps)
