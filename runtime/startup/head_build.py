"""Loads what drafts beside the served model: a trained head or a draft model, as the files say."""

import dataclasses
from pathlib import Path
from typing import Protocol

from flax import nnx

from meshserve.sharding.memory import shard_bytes

from ..api.errors import ConfigError
from ..api.model_config import read_json
from ..draft_head.eagle3_config import is_head, read_head
from ..draft_head.head_programs import Head, chain_buckets, to_lower
from ..draft_head.head_runner import HeadRunner
from ..draft_head.head_weights import head_layout, load_head
from ..draft_model.drafting_runner import RunnerBeside
from ..options.serve_config import ServeConfig
from ..planning.resolved_server import PlacedServer
from ..program.batch import Bucket
from ..program.compile_cache import compile_all
from ..program.step_runner import StepRunner
from ..weights.locate import ModelFiles, find_model
from .draft_build import load_draft_model


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
class LoadedHead:
    """A trained head whose weights are on the devices. Implements `Drafting`."""

    head: Head
    server: PlacedServer  # of the served model

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
        return HeadRunner(served, self.head.weights, dict(zip(programs, compiled, strict=True)))


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
    if is_head(read_json(files.small / "config.json")):
        return _load_head(files, served, params)
    return load_draft_model(config, served, tokenizer_file)


def _load_head(files: ModelFiles, served: PlacedServer, params: nnx.State) -> LoadedHead:
    if served.model.pooling is not None:
        raise ConfigError("--draft-model: embedding and reranking models draft nothing. Omit it.")
    if served.layout.cp > 1:
        raise ConfigError("--draft-model: a trained head does not divide pages among devices yet. Set --cp 1.")
    config = read_head(read_json(files.small / "config.json"), served.model)
    embedding = params["embedding"].get_value()
    structure, head_params = load_head(files.weights, config, served.mesh, served.dtype, embedding)
    layout = head_layout(config, served.mesh.size)
    return LoadedHead(
        head=Head(
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
