"""Tunix's rollout worker that samples with a `meshserve.LLM` of the same process.

    from meshserve.integrations.tunix import MeshserveRollout

    llm = LLM("Qwen/Qwen3-4B", tp=4, reserve_mib=40_000)
    cluster = rl_cluster.ClusterConfig(rollout_engine=functools.partial(MeshserveRollout, llm=llm), ...)

Written for google-tunix 0.1.7, in which nothing has to be changed: `RLCluster` creates the worker, samples with
`generate`, and hands over the actor's weights with `update_params` after each step, device to device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshserve.runtime.api.errors import UnavailableFeatureError
from meshserve.runtime.api.request import MAX_SAMPLES
from meshserve.runtime.offline.llm import LLM
from meshserve.runtime.offline.outputs import CompletionOutput
from meshserve.runtime.offline.user_params import LLMSamplingParams

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ImportError as error:
    raise ImportError(
        f"meshserve.integrations.tunix needs google-tunix 0.1.7, which cannot be imported ({error}). Install it: pip "
        "install google-tunix."
    ) from error

_SEED_BITS = 62  # sample i of a prompt has its seed + i, below 2^63


class MeshserveRollout(BaseRollout):
    """Samples for Tunix with meshserve. Its arguments but `llm` are those that `RLCluster` passes.

    The LLM begins with the actor's weights. It may lie on other devices than the actor, and have any TP size. LoRA is
    not supported, nor `ClusterConfig.offload_to_cpu`: `llm.sleep` and `llm.wake` give up the devices' memory meanwhile.

    Args:
      rollout_actor: Tunix's Qwen3, dense or with experts, whose weights the LLM takes. None keeps the LLM's own.
      tokenizer: Encodes prompts and decodes samples, as for Tunix's own sampler.
      mesh: The cluster's mesh for rollouts; not used: the LLM has its own.
      rollout_config: Not used; each call of `generate` has one.
      llm: The engine. It stays the caller's, who closes it.

    Raises:
      InvalidRequestError: The actor is another model than the LLM's.
      UnavailableFeatureError: It has LoRA parameters, or see `LLM.update_weights`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module | None,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        llm: LLM,
    ):
        self._llm, self._num_calls = llm, 0
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        if rollout_actor is not None:
            has_lora = bool(jax.tree.leaves(nnx.state(rollout_actor, nnx.LoRAParam)))
            kind = nnx.LoRAParam if has_lora else nnx.Param
            self.update_params(nnx.state(rollout_actor, kind), (kind,))

    @property
    def model_version(self) -> str:
        """The version of the weights that compute the next tokens; `update_params` counts it."""
        return self._llm.weight_version

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Samples once for each prompt. Equal prompts are computed once, and sampled several times.

        With a seed, the samples of each call differ, and those of all calls together depend on it.

        Args:
          prompts: Texts.
          rollout_config: Read are `max_tokens_to_generate`, `temperature`, `top_p`, `top_k`, `seed`,
            `max_prompt_length` (to which prompts are padded), `eos_tokens` and `return_logprobs`.
          **kwargs: None is known.

        Returns:
          In the order of the prompts: texts, and tokens without the one that ended them; no logits; if asked for, the
          log-probability of each token in the distribution that it was sampled from.

        Raises:
          TypeError: There are further arguments.
          InvalidRequestError, EngineStoppedError: See `LLM.generate`.
        """
        if kwargs:
            raise TypeError(f"got {', '.join(kwargs)}; MeshserveRollout.generate takes no further arguments.")
        tokens = [self._encoded(prompt) for prompt in prompts]
        groups = list(_groups(tokens))
        seeds = _seeds(rollout_config.seed, self._num_calls, len(groups))
        self._num_calls += 1
        params = [self._params(rollout_config, len(members), seed) for members, seed in zip(groups, seeds, strict=True)]
        outputs = self._llm.generate([tokens[members[0]] for members in groups], params, use_tqdm=False)
        samples: dict[int, CompletionOutput] = {}
        for members, output in zip(groups, outputs, strict=True):
            samples |= zip(members, output.outputs, strict=True)
        ordered = [samples[index] for index in range(len(prompts))]
        return RolloutOutput(
            text=[self._tokenizer.decode(list(sample.token_ids)) for sample in ordered],
            logits=None,
            tokens=[np.array(sample.token_ids, np.int32) for sample in ordered],
            left_padded_prompt_tokens=_left_padded(tokens, rollout_config.max_prompt_length, self.pad_id()),
            logprobs=[_logprobs(sample) for sample in ordered] if rollout_config.return_logprobs else None,
        )

    def _encoded(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt, as Tunix's own sampler encodes it."""
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return list(self._tokenizer.dedup_bos_ids(begin + list(self._tokenizer.encode(prompt))))

    def _params(self, config: RolloutConfig, num_samples: int, seed: int | None) -> LLMSamplingParams:
        more: dict[str, Any] = {"logprobs": 0, "processed_logprobs": True} if config.return_logprobs else {}
        return LLMSamplingParams(
            n=num_samples,
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=max(config.top_k or 0, 0),
            seed=-1 if seed is None else seed,
            ignore_eos=True,  # Tunix's list replaces the model's
            stop_token_ids=list(config.eos_tokens or [self.eos_id()]),
            **more,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Returns the log-probabilities of completions, in the model's own distribution (temperature 1).

        Args:
          prompt_tokens: [B, P], padded with `pad_id`.
          completion_tokens: [B, C], padded likewise.

        Returns:
          [B, C] float32; 0 where the completions are padded.

        Raises:
          InvalidRequestError, EngineStoppedError: See `LLM.score`.
        """
        prompts, completions = (np.asarray(tokens) for tokens in (prompt_tokens, completion_tokens))
        is_token = completions != self.pad_id()
        known = [list(row[row != self.pad_id()]) for row in prompts]
        scores = self._llm.score(
            [prompt + list(row[kept]) for prompt, row, kept in zip(known, completions, is_token, strict=True)]
        )
        found = np.zeros(completions.shape, np.float32)
        for row, prompt, kept, values in zip(found, known, is_token, scores, strict=True):
            row[kept] = values[len(prompt) - 1 :]
        return jax.numpy.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the LLM's weights. Requests of other threads go on with the new ones.

        Args:
          params: All parameters of Tunix's Qwen3 (`nnx.state(model, nnx.Param)`), with any sharding.
          filter_types: What `params` was filtered by.

        Raises:
          UnavailableFeatureError: They are LoRA parameters, or see `LLM.update_weights`.
          InvalidRequestError, MemoryError, EngineStoppedError: See `LLM.update_weights`. The old weights stay.
        """
        if filter_types is not None and nnx.LoRAParam in filter_types:
            raise UnavailableFeatureError(
                "MeshserveRollout takes all weights of a model, and the actor trains LoRA parameters only. Train all "
                "parameters."
            )
        with jax.transfer_guard("allow"):  # on CPU devices, RLCluster forbids the index of a layer to reach a program
            self._llm.update_weights(params)

    def pad_id(self) -> int:
        """Returns the tokenizer's padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's end token."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: no model of Tunix samples, so that learners synchronize weights after each step."""
        return None


def _groups(tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields the indices of equal prompts, as many together as a request may have samples."""
    equal: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(tokens):
        equal.setdefault(tuple(prompt), []).append(index)
    for members in equal.values():
        for start in range(0, len(members), MAX_SAMPLES):
            yield members[start : start + MAX_SAMPLES]


def _seeds(seed: Any, num_calls: int, count: int) -> list[int | None]:
    """Returns the seed of each prompt of a call, given Tunix's: None, a number, or a key of JAX."""
    if seed is None:
        return [None] * count
    if isinstance(seed, jax.Array) and jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).astype(np.uint64).reshape(-1).tolist()
    drawn = np.random.SeedSequence([*words, num_calls]).generate_state(count, np.uint64)
    return [int(each) >> (64 - _SEED_BITS) for each in drawn]


def _left_padded(tokens: Sequence[Sequence[int]], length: int, pad_id: int) -> np.ndarray:
    """Returns prompts [B, P] int32 of this length, or of the next power of two if one is longer, as in Tunix."""
    longest = max(map(len, tokens))
    length = length if longest <= length else 1 << (longest - 1).bit_length()
    padded = np.full((len(tokens), length), pad_id, np.int32)
    for row, prompt in zip(padded, tokens, strict=True):
        row[length - len(prompt) :] = prompt
    return padded


def _logprobs(sample: CompletionOutput) -> np.ndarray:
    found = zip(sample.logprobs or (), sample.token_ids, strict=True)
    return np.array([position[token_id].logprob for position, token_id in found], np.float32)
