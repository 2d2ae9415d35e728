"""Models in object stores: read through fsspec, here from one in memory; refused where nothing reads the store."""

import pwd

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from meshserve.runtime.weights.load import load_model, read_model_with_weights
from meshserve.runtime.weights.locate import DEMO_DIRECTORY, find_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.storage import as_path, file_bytes
from meshserve.sharding.mesh import make_mesh

DEMO = DEMO_DIRECTORY


class Bucket(MemoryFileSystem):
    """A Google Cloud Storage that lives in this process."""

    protocol = ("gs", "gcs")
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("gs://").strip("/")


@pytest.fixture
def bucket() -> str:
    fsspec.register_implementation("gcs", Bucket, clobber=True)
    store = fsspec.filesystem("gcs")
    for path in DEMO.iterdir():
        store.pipe_file(f"gs://models/demo/{path.name}", path.read_bytes())
    return "gs://models/demo"


def test_a_model_in_a_bucket(bucket: str) -> None:
    files = find_model(bucket)
    assert (files.small / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert not list(files.small.glob("*.safetensors"))
    config = read_model(files.small / "config.json")
    target = config, model_layout(config, 4), make_mesh(4), jnp.dtype("bfloat16")
    remote, local = load_model(files.weights, *target)[1], load_model(DEMO, *target)[1]
    for name in ("embedding", "norm"):
        np.testing.assert_array_equal(np.asarray(remote[name][...]), np.asarray(local[name][...]))


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"s3://models/demo is remote .* Install meshserve\[remote\]"):
        as_path("s3://models/demo")
    with pytest.raises(CheckpointError, match="unknown scheme; paths are local or begin with gs:// or s3://"):
        as_path("http://models/demo")


def test_the_owner_of_a_local_file_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a mounted volume in a container."""

    def unknown(user_id: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    path = epath.Path(DEMO / "config.json")
    with pytest.raises(KeyError, match="uid not found"):
        path.stat()
    assert file_bytes(path) == len(path.read_bytes())
    read_model_with_weights(DEMO / "config.json", epath.Path(DEMO))
