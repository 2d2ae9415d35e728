"""`meshserve compile`: fills a cache folder with the programs of a server, without serving.

It starts a server up to the point where it would serve: only with the weights on the devices is the number of pages
known, and every shape of the KV cache with it. So it takes the devices, the memory and the time of a first start.
"""

import dataclasses
import os
from pathlib import Path

from meshserve.kernels.cuda.user_folder import user_folder

from ..api.errors import ConfigError
from ..options.serve_config import ServeConfig
from ..program.compile_cache import CompileCounts, CompileWatch
from ..weights.local_adapters import with_local_adapters
from ..weights.locate import find_model
from .launch import build_runner, params_of, read_model_of


@dataclasses.dataclass(frozen=True)
class FilledFolder:
    """What a folder has now."""

    folder: Path
    counts: CompileCounts

    def __str__(self) -> str:
        files = list((self.folder / "programs").glob("*.program"))
        size = sum(path.stat().st_size for path in files) / 1e6
        counts = self.counts
        return (
            f"{self.folder} has {len(files)} programs, {size:,.0f} MB: {counts.num_compiles} were compiled now and "
            f"{counts.num_loaded} were there. A server with the same options and --cache-dir loads them on machines "
            "with the same devices and the same meshserve, jax and Python, also from a read-only mount."
        )


def compile_ahead(config: ServeConfig) -> FilledFolder:
    """Compiles the programs of a server into its `cache_dir`, and runs each once where a start does.

    Raises:
      ConfigError: There is no folder, it cannot be written to, or the options are those of a cluster.
      MeshserveError, CheckpointError, ValueError, MemoryError: As `launch`.
    """
    if config.coordinator:
        raise ConfigError("compile fills a folder for servers of one process; leave out --coordinator.")
    if not config.cache_dir:
        raise ConfigError("compile needs a folder: set --cache-dir.")
    folder = user_folder(config.cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache_dir is {config.cache_dir}: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cache_dir is {config.cache_dir}, to which this user cannot write.")
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    model, config = read_model_of(config, files), with_local_adapters(config)
    tokenizer = files.small / "tokenizer.json"
    with CompileWatch() as watch:
        build_runner(config, model, params_of(files), tokenizer_file=tokenizer if tokenizer.is_file() else None)
        counts = watch.counts
    return FilledFolder(folder, counts)
