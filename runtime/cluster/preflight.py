"""Comparison of the processes of a cluster before they start, and agreement on shared values during startup."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from etils import epath

from meshserve.sharding.checkpoints.storage import open_file, read_text

from ..api.versions import UNKNOWN, installed_version
from ..options.serve_config import ServeConfig, options
from ..weights.locate import ModelFiles, find_model
from .membership import Membership, start_devices
from .steps import OPTIONS_MEETING

_PACKAGES = ("meshserve", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
_SAMPLE_BYTES = 64 * 1024


class ProcessGroup(Protocol):
    """Interface of both ends of the step stream."""

    def meet(self, name: str, facts: Mapping[str, str], value: int = 0) -> int:
        """Waits until every process has reported under this name and returns the minimum of their values.

        Raises:
          ClusterError: The facts differ, or a process has failed.
        """


@dataclass(frozen=True)
class Cluster:
    """The cluster as seen by the code that starts an engine."""

    membership: Membership
    group: ProcessGroup

    def compare_options(self, config: ServeConfig) -> None:
        """Compares options and versions. Every process does this at once, before it looks for the model.

        Raises:
          ClusterError: See `ProcessGroup.meet`.
        """
        self.group.meet(OPTIONS_MEETING, common_facts(config, self.membership))

    def begin(self, config: ServeConfig, files: ModelFiles) -> None:
        """Compares the models, then initializes the devices.

        Raises:
          ClusterError: See `ProcessGroup.meet` and `start_devices`.
        """
        self.group.meet("models", model_facts(config, files))
        start_devices(self.membership)

    def num_pages(self, num_pages: int, **programs: object) -> int:
        """Compares the inputs of the programs across processes and returns the minimum number of pages."""
        return self.group.meet("programs", {name: _digest(repr(thing)) for name, thing in programs.items()}, num_pages)

    def compiled(self) -> None:
        """Waits until all processes have their programs: in a first step, none waits long for another's compiler."""
        self.group.meet("compilation", {})

    def ready(self) -> None:
        """Waits until all processes are ready for the first step."""
        self.group.meet("readiness", {})


def common_facts(config: ServeConfig, membership: Membership) -> dict[str, str]:
    """Returns what must be equal on all processes besides the model: options and package versions."""
    facts = {name: str(getattr(config, name)) for name, each in options().items() if not each.may_differ}
    facts["num_processes"] = str(membership.num_processes)
    return facts | {
        f"version of {name}": version for name in _PACKAGES if (version := installed_version(name)) != UNKNOWN
    }


def model_facts(config: ServeConfig, files: ModelFiles) -> dict[str, str]:
    """Returns what must be equal of the model, and of the draft model if there is one."""
    facts = _model_facts(files, "")
    if config.draft_model:
        facts |= _model_facts(find_model(config.draft_model, random_weights=config.random_weights), "draft model's ")
    return facts


def _model_facts(files: ModelFiles, whose: str) -> dict[str, str]:
    return {
        f"{whose}config.json": _digest(read_text(files.small / "config.json")),
        f"{whose}weights": _weights_digest(files.weights) if files.weights is not None else "random",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights_digest(directory: epath.Path) -> str:
    """Returns a digest of the names, sizes, first and last bytes of the weight files.

    For an Orbax checkpoint, only its manifest is read, which contains the checksums of all files. No process reads all
    weights, so the digest is a sample: a file of equal size that differs only in the middle is not detected.
    """
    digest = hashlib.sha256()
    pattern = "checkpoint.json" if (directory / "checkpoint.json").exists() else "*.safetensors"
    for path in sorted(directory.glob(pattern)):
        file = open_file(path, "")
        sample = np.empty(min(file.size, _SAMPLE_BYTES), np.uint8)
        digest.update(repr((path.name, file.size)).encode())
        for offset in (0, file.size - sample.size):
            file.read_into(offset, sample)
            digest.update(sample.tobytes())
    return digest.hexdigest()[:16]
