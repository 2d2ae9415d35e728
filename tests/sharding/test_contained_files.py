"""Tests that no name and no link in a model's directory leads to a file elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from meshserve.runtime.api.errors import ConfigError, UnsupportedModelError
from meshserve.runtime.gateway.vllm_service import _tokenizer_zip
from meshserve.runtime.model_files.generation_config import read_eos_token_ids
from meshserve.runtime.model_files.model_config import read_json
from meshserve.runtime.weights.locate import find_model
from meshserve.runtime.weights.model_task import published_task
from meshserve.sharding.checkpoints.checkpoint import MANIFEST_FILE, OrbaxCheckpoint
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.storage import file_within
from meshserve.sharding.checkpoints.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles, weight_files
from meshserve.sharding.guarded_files import GuardedFileError, check_name, contained
from tests import checkpoints

SECRET = "root:x:0:0:a secret of 4711 bytes"
# Names of files elsewhere, as an index may have them; {} stands for the directory above the model's.
LEADING_OUT = [
    "../secret", "../../../../../../etc/passwd", "/etc/passwd", "{}/secret", "a/../../secret", "./../secret", "..",
    "//etc/passwd", "~/secret", "..\\secret", "file:///etc/passwd", "gs://bucket/secret",
]  # fmt: skip
NO_NAMES: list[Any] = [None, 1, 1.5, True, [], {"a": 1}, "", "a\0b", "a\nb", "a" * 100_000]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return checkpoints.truncated_demo(tmp_path / "model", 1)


def write_index(model: Path, name: object) -> None:
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize("name", LEADING_OUT)
def test_an_index_names_files_of_its_directory_only(name: str, model: Path) -> None:
    write_index(model, name.format(model.parent))
    with pytest.raises(CheckpointError, match="the name leads out of the model's directory; allowed are") as caught:
        TensorFiles(model)
    assert INDEX_FILE in str(caught.value)
    assert "bytes" not in str(caught.value) and str(len(SECRET)) not in str(caught.value)


@pytest.mark.parametrize("name", NO_NAMES, ids=range(len(NO_NAMES)))
def test_an_index_has_names(name: object, model: Path) -> None:
    write_index(model, name)
    with pytest.raises(CheckpointError, match="is not the name of a file|is not an index") as caught:
        TensorFiles(model)
    assert len(str(caught.value)) < 1000


def test_names_of_a_remote_index_do_not_lead_out_either() -> None:
    class Remote:
        """A directory of an object store."""

        def __truediv__(self, name: str) -> Any:
            return epath.Path("gs://bucket/model") / name

    assert str(file_within(Remote(), "a.safetensors", "i")) == "gs://bucket/model/a.safetensors"  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="leads out"):
        file_within(Remote(), "../other/a.safetensors", "i")  # type: ignore[arg-type]


def test_files_of_folders_and_with_dots_in_their_names_are_read(model: Path) -> None:
    (model / "part").mkdir()
    (model / SINGLE_FILE).rename(model / "part" / "a..b.safetensors")
    write_index(model, "part/a..b.safetensors")
    assert weight_files(epath.Path(model)) == [model / "part" / "a..b.safetensors"]
    TensorFiles(model)


# Reads a file of a model, which is a link to a file elsewhere.
READERS: dict[str, Callable[[Path], object]] = {
    SINGLE_FILE: TensorFiles,
    INDEX_FILE: TensorFiles,
    "config.json": lambda model: read_json(model / "config.json"),
    "generation_config.json": read_eos_token_ids,
    "modules.json": published_task,
    "tokenizer.json": lambda model: _tokenizer_zip(model),
    "merges.txt": lambda model: _tokenizer_zip(model),
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", READERS)
def test_links_that_leave_the_directory_are_not_followed(name: str, depth: int, model: Path) -> None:
    path, target = model / name, model.parent / "secret"
    target.write_text("{}" if name.endswith("json") else SECRET)
    path.unlink(missing_ok=True)
    if depth:  # by a folder that is a link
        (model / "folder").symlink_to(model.parent)
        target = Path("folder", "secret")
    path.symlink_to(target)
    expected = (CheckpointError, UnsupportedModelError, GuardedFileError)
    with pytest.raises(expected, match="a link that leads out of the model's directory"):
        READERS[name](model)
    with pytest.raises(ConfigError, match=r"(folder|json|safetensors|txt): it is a link that leads out of the model's"):
        find_model(str(model))


def test_links_that_stay_in_the_directory_are_followed(model: Path) -> None:
    """A volume of Kubernetes has all its files behind such links."""
    real = model.parent / "volume"
    model.rename(real)
    data = real / "..2026_11_29"
    data.mkdir()
    (real / "..data").symlink_to(data.name)
    for path in [path for path in real.iterdir() if path.is_file()]:
        path.rename(data / path.name)
        path.symlink_to(Path("..data", path.name))
    model.symlink_to(real)  # nor does it matter where the directory itself is
    find_model(str(model))
    TensorFiles(model)


def hub_cache(folder: Path, model: Path, blobs: str = "blobs") -> Path:
    """Makes a cache as Hugging Face's hub has it, and returns the directory of the model."""
    snapshot = folder / "models--a--b" / "snapshots" / "0123abcd"
    (snapshot / "1_Pooling").mkdir(parents=True)
    store = folder / "models--a--b" / blobs
    store.mkdir()
    for path in model.iterdir():
        path.rename(store / path.name)
        (snapshot / path.name).symlink_to(Path("..", "..", blobs, path.name))
    (store / "pooling").write_text('{"pooling_mode_lasttoken": true}')
    (snapshot / "1_Pooling" / "config.json").symlink_to(Path("..", "..", "..", blobs, "pooling"))
    return snapshot


def test_the_cache_of_the_hub_is_read(model: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "hub", model)
    (snapshot / "modules.json").write_text('[{"type": "a.Pooling", "path": "1_Pooling"}]')
    find_model(str(snapshot))
    TensorFiles(snapshot)
    assert published_task(snapshot) == "embed"


def test_what_only_looks_like_the_cache_of_the_hub_is_not(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a link that leads out"):
        find_model(str(hub_cache(tmp_path / "hub", model, "elsewhere")))
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir()
    for link in blobs.parent.glob("snapshots/*/*.json"):
        link.unlink()
        (blobs / link.name).symlink_to(tmp_path / "secret")  # a blob that is itself a link
        link.symlink_to(blobs / link.name)
    with pytest.raises(ConfigError, match="a link that leads out"):
        find_model(str(next(blobs.parent.glob("snapshots/*"))))


@pytest.mark.parametrize("path", ["../other", "/etc", ".."])
def test_a_pooling_folder_is_in_the_directory(path: str, model: Path) -> None:
    (model.parent / "other").mkdir()
    (model.parent / "other" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (model / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": path}]))
    with pytest.raises(UnsupportedModelError, match=r"modules.json: \S+ is not read: the name leads out"):
        published_task(model)


@pytest.mark.parametrize("part", ["../../secret", "/etc/passwd", "..\\a", ""])
def test_parts_of_an_orbax_checkpoint_are_in_its_directory(part: str, tmp_path: Path) -> None:
    manifest = {"format": "meshserve orbax", "format_version": 1, "meshserve_version": "0", "dtype": "bfloat16"}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({**manifest, "num_bytes": 0, "source": {}, "parts": {part: "0"}}))
    with pytest.raises(CheckpointError, match=r"is not read: (the name leads out|it is not the name)"):
        OrbaxCheckpoint(tmp_path)


def test_links_in_the_folders_that_libraries_read_do_not_leave_either(model: Path) -> None:
    for folder in ("weights", "digests", "additional_chat_templates"):
        (model / folder / "a").mkdir(parents=True)
        link = model / folder / "a" / "b"
        link.symlink_to(model.parent / "secret")
        with pytest.raises(ConfigError, match=r"a/b: it is a link that leads out"):
            find_model(str(model))
        link.unlink()
    find_model(str(model))


def test_names_are_checked_before_anything_is_looked_at(tmp_path: Path) -> None:
    assert contained(tmp_path, "a/b") == tmp_path / "a" / "b", "which need not exist"
    for name in LEADING_OUT:
        with pytest.raises(GuardedFileError):
            check_name(name.format("/model"))
