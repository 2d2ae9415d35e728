"""Loads what drafts beside the served model, a draft model or a trained head, and compiles its programs."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.sharding.checkpoints.storage import read_text
from meshserve.sharding.memory import shard_bytes

from ..api.errors import ConfigError
from ..api.tasks import GENERATE
from ..model_files.model_config import ModelConfig, read_json
from ..model_files.quantization import NOT_QUANTIZED
from ..options.serve_config import ServeConfig
from ..program.batch import ANY_MODE, Bucket
from ..program.compile_cache import compile_all
from ..program.step_runner import StepRunner
from ..resolve.resolved_server import PlacedServer, resolve_here
from ..weights.load import load_model, read_model_with_weights
from ..weights.locate import ModelFiles, find_model
from ..weights.random_weights import random_model
from .heads.block_config import BlockConfig
from .heads.head_programs import Head, chain_buckets, to_lower
from .heads.head_runner import HeadRunner
from .heads.head_weights import HeadKind, head_layout, kind_of, load_head
from .model.draft_filling import DraftFilling
from .model.drafting_runner import DraftingRunner, RunnerBeside


class Drafting(Protocol):
    """What drafts beside the served model, with its weights on the devices."""

    @property
    def head(self) -> Head | None:
        """The head with which the steps of the served model are compiled, if it is one."""

    @property
    def page_bytes(self) -> int:
        """Bytes on each device that it adds to a page of the KV cache."""

    @property
    def output_bytes(self) -> int:
        """Bytes on each device that its own dispatches need."""

    def chain_buckets(self) -> tuple[Bucket, ...]:
        """Returns the shapes of the dispatches that propose draft tokens."""

    def beside(self, served: StepRunner) -> RunnerBeside:
        """Compiles its programs for the pages of a started runner, and returns the runner of both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A draft model whose weights are on the devices."""

    server: PlacedServer  # as if it were served alone, with the shapes of steps that it needs
    followed_by: dict[Bucket, Bucket]  # for each bucket of the served model, that of the draft model's same step
    structure: nnx.GraphDef
    params: nnx.State

    @property
    def head(self) -> None:
        """None: steps of the served model do nothing for it."""

    @property
    def page_bytes(self) -> int:
        """Bytes on each device that it adds to a page of the KV cache."""
        return self.server.page_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes on each device of the logits and hidden states that its last step leaves."""
        largest, layout = self.server.buckets[-1], self.server.layout
        logits = largest.num_requests * layout.vocab_size // layout.num_shards * 4
        return logits + largest.num_tokens * self.server.model.embed_dim * self.server.dtype.itemsize

    def chain_buckets(self) -> tuple[Bucket, ...]:
        """Returns the shapes of the dispatches that propose draft tokens."""
        return tuple(bucket for bucket in self.server.buckets if bucket.num_steps > 1)

    def beside(self, served: StepRunner) -> DraftingRunner:
        """Compiles its programs for the pages of a started runner, and starts both as one."""
        server = self.server
        programs = server.programs(self.structure, self.params, server.cache_shape(served.num_pages))
        draft = programs.compile_runner(num_threads=server.compile_threads)
        draft.start(self.params)
        table = served.last_tokens
        copy = jax.jit(jnp.copy, out_shardings=table.sharding).lower(table).compile()
        fill = DraftFilling(self.chain_buckets(), self.followed_by, server.mesh, server.compile_threads)
        return DraftingRunner(served, draft, fill, self.followed_by, copy)


def _load_draft_model(config: ServeConfig, served: PlacedServer, tokenizer_file: Path | None) -> DraftModel:
    """Finds the model that `draft_model` names, checks that it suits the served one, and loads it.

    Args:
      tokenizer_file: The served model's tokenizer.json, if it has one.

    Raises:
      ConfigError: It does not suit the served model. The message says why.
      MeshserveError, CheckpointError, ValueError, MemoryError: As for the served model.
    """
    files = find_model(config.draft_model, random_weights=config.random_weights)
    model = read_model_with_weights(files.small / "config.json", files.weights, NOT_QUANTIZED)
    _check(config.draft_model, model, files, served.model, tokenizer_file)
    limits = served.limits
    alone = dataclasses.replace(
        config,
        model=config.draft_model,
        draft_model="",
        draft_tokens=0,
        tp=served.tp,
        cp=1,
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        max_decode_steps=limits.draft_tokens,
        max_context=limits.max_context,
        logits_processors=False,
        expert_parallel=False,
        quantize=NOT_QUANTIZED,
        fp8_head=False,
        task=GENERATE,
        adapter=(),  # a drafter without them is right: what it proposes is verified
        max_adapters=0,
    )
    server = resolve_here(alone, model, served.mesh, served.findings)
    drafted = {bucket.num_tokens for bucket in served.buckets if bucket.has_drafts}
    followed_by = {bucket: _following(bucket, server.buckets, drafted) for bucket in served.buckets}
    chains = [bucket for bucket in server.buckets if bucket.num_steps > 1]
    buckets = sorted({*followed_by.values(), *chains}, key=lambda bucket: bucket.num_tokens)
    kernels = dataclasses.replace(
        server.kernels, readback=None
    )  # its samples in the steps of the served model are ignored
    server = dataclasses.replace(server, buckets=tuple(buckets), kernels=kernels)
    target = (model, server.layout, server.mesh, server.dtype)
    structure, params = random_model(*target) if files.weights is None else load_model(files.weights, *target)
    return DraftModel(server=server, followed_by=followed_by, structure=structure, params=params)


def _following(bucket: Bucket, candidates: Sequence[Bucket], drafted: Collection[int]) -> Bucket:
    """Returns the bucket in which a draft model runs a step of the served model: the sampled tokens do not matter.

    It runs all decodes of a size in one program, which takes draft tokens if some of the served model's of this size
    do; `drafted` has these sizes.
    """
    shape = bucket.num_tokens, bucket.num_requests, bucket.num_new_pages
    for each in candidates:
        is_same = (each.num_tokens, each.num_requests, each.num_new_pages) == shape and each.num_steps == 1
        if is_same and (bucket.is_decode or not each.is_decode):
            return dataclasses.replace(each, has_drafts=each.is_decode and bucket.num_tokens in drafted)
    return Bucket(*shape, mode=ANY_MODE)


def _check(name: str, draft: ModelConfig, files: ModelFiles, served: ModelConfig, tokenizer_file: Path | None) -> None:
    if served.pooling is not None or draft.pooling is not None:
        raise ConfigError("--draft-model: embedding and reranking models draft nothing. Omit it.")
    if draft.vocab_size != served.vocab_size:
        raise ConfigError(
            f"--draft-model {name} has a vocabulary of {draft.vocab_size} tokens and the served model one of "
            f"{served.vocab_size}; both must have the same tokenizer. Use a smaller model of the same family."
        )
    own = files.small / "tokenizer.json"
    if tokenizer_file is not None and own.exists() and _tokens(own) != _tokens(tokenizer_file):
        raise ConfigError(
            f"--draft-model {name} has another tokenizer than the served model. Use a smaller model of the same family."
        )


def _tokens(tokenizer_file: Path) -> Any:
    """Returns the ids of all tokens of a tokenizer.json."""
    content = json.loads(read_text(tokenizer_file))
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    return content["model"]["vocab"], added


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedHead:
    """A trained head whose weights are on the devices. Implements `Drafting`."""

    head: Head
    server: PlacedServer  # for the served model

    @property
    def page_bytes(self) -> int:
        return shard_bytes(self.head.state_shapes(self.server.cache_shape(1)))

    @property
    def output_bytes(self) -> int:
        return 2 * self.server.limits.max_running * self.head.layout.vocab_size // self.head.layout.num_shards * 4

    def chain_buckets(self) -> tuple[Bucket, ...]:
        return chain_buckets(self.server.buckets, self.server.limits.draft_tokens)

    def beside(self, served: StepRunner) -> RunnerBeside:
        shape = self.server.cache_shape(served.num_pages)
        programs = to_lower(self.head, self.chain_buckets(), shape, served.state.page_table)
        lowered = (lower() for lower in programs.values())
        compiled = compile_all(lowered, len(programs), self.server.compile_threads)
        fill = DraftFilling(self.chain_buckets(), self.server.buckets, self.server.mesh, self.server.compile_threads)
        return HeadRunner(served, fill, self.head.weights, dict(zip(programs, compiled, strict=True)))


def load_drafting(
    config: ServeConfig, served: PlacedServer, params: nnx.State, tokenizer_file: Path | None
) -> Drafting:
    """Finds the model or head that `draft_model` names, checks that it suits the served one, and loads it.

    Args:
      config: The options.
      served: The served model's server.
      params: Its parameters.
      tokenizer_file: The served model's tokenizer.json, if it has one.

    Raises:
      ConfigError: It does not suit the served model. The message says why.
      MeshserveError, CheckpointError, ValueError, MemoryError: As for the served model.
    """
    files = find_model(config.draft_model, random_weights=config.random_weights)
    if (kind := kind_of(read_json(files.small / "config.json"))) is not None:
        return _load_head(kind, files, served, params)
    return _load_draft_model(config, served, tokenizer_file)


def _load_head(kind: HeadKind, files: ModelFiles, served: PlacedServer, params: nnx.State) -> LoadedHead:
    if served.model.pooling is not None:
        raise ConfigError("--draft-model: embedding and reranking models draft nothing. Omit it.")
    if served.layout.cp > 1:
        raise ConfigError("--draft-model: a trained head does not divide pages among devices yet. Set --cp 1.")
    config = kind.config(read_json(files.small / "config.json"), served.model)
    needs_head = bool(kind.shared(config, jnp.zeros(0)))
    if needs_head and not served.model.is_tied and served.model.head_quantization is not None:
        raise ConfigError(
            "--draft-model: this drafter uses the served model's output head, which is quantized. Omit --fp8-head."
        )
    if isinstance(config, BlockConfig) and served.limits.draft_tokens >= config.block_size:
        raise ConfigError(
            f"--draft-tokens is {served.limits.draft_tokens}; this drafter was trained for blocks of "
            f"{config.block_size}, so that {config.block_size - 1} are allowed. Lower it."
        )
    tables = {"embedding": params["embedding"].get_value()}
    if needs_head:
        tables["head"] = params["embedding" if served.model.is_tied else "head"].get_value()
    structure, head_params = load_head(kind, files.weights, config, served.mesh, served.dtype, tables)
    layout = head_layout(config, served.mesh.size)
    return LoadedHead(
        head=kind.head(
            config=config,
            layout=layout,
            dtype=served.dtype,
            mesh=served.mesh,
            kernels=served.kernels,
            structure=structure,
            params=head_params,
        ),
        server=served,
    )
