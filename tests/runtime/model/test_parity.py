"""The same tokens as Hugging Face in float32, at every TP size, and the same hidden states."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch, implementation
from meshserve.runtime.backend.step_context import StepContext
from meshserve.runtime.commands.cli import main
from meshserve.runtime.model.layers.rope import rotation
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.layout import shard_layout
from meshserve.sharding.mesh import make_mesh, partition_spec
from tests import checkpoints

pytestmark = pytest.mark.usefixtures("greedy_programs")

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 64, 150)
MAX_TOKENS = 12
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip

SHAPES = {
    "tied": {},
    "untied_2_kv_heads": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "8_kv_heads": {"num_key_value_heads": 8},
    "odd_vocab_and_mlp": {"vocab_size": 333, "intermediate_size": 90, "tie_word_embeddings": False},
    "sharded_files": {"shard_size": "60KB"},
    "yarn": {"rope_parameters": YARN},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each shape."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: checkpoints.save_checkpoint(root / name, seed=index, **overrides)
        for index, (name, overrides) in enumerate(SHAPES.items())
    }


def run_generate(model: Path, directory: Path, prompts: list[list[int]], **options: object) -> list[list[int]]:
    """`meshserve generate`, as a user would call it."""
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text(
        "".join(
            json.dumps(
                {"prompt_token_ids": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
            ) + "\n"
            for prompt in prompts
        )
    )  # fmt: skip
    flags = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        if isinstance(value, bool)
        else f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
    ]
    assert (
        main(["generate", f"--model={model}", "--dtype=float32", *flags, f"--input={source}", f"--output={target}"])
        == 0
    )
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(len(prompts)))
    assert all(line["finish_reason"] == "length" for line in lines)
    return [line["token_ids"] for line in lines]


# Few shapes, because compiling them is what takes the time; 8 tokens a step also means many chunks and mixed batches.
SMALL = {"max_running": 8, "max_step_tokens": 8, "page_size": 16, "num_pages": 256}
WITHOUT_PROCESSORS = {"logits_processors": False}  # fewer programs


@pytest.mark.parametrize("name", SHAPES)
def test_sharded_files_are_sharded(name: str, models: dict[str, Path]) -> None:
    """The shapes are what they claim to be."""
    assert (models[name] / "model.safetensors.index.json").exists() == (name == "sharded_files")


# Each TP size with some shape, and each shape at the TP sizes that make a difference to it: compiling takes the time.
TP_SIZES = {
    "tied": (1, 2, 4, 8),  # 4 KV heads: several of a device, one, and one on two devices
    "untied_2_kv_heads": (1, 8),  # whole, and each KV head on four devices
    "8_kv_heads": (2, 8),  # as many KV heads as query heads
    "odd_vocab_and_mlp": (2, 8),  # padding of the vocabulary, and of the MLP too
    "sharded_files": (2,),  # their programs are those of "tied"
    "yarn": (4,),
}


@pytest.mark.parametrize("name", SHAPES)
def test_same_tokens_as_hugging_face(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    prompts = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320)
    expected = checkpoints.greedy(models[name], prompts, MAX_TOKENS)
    for tp in TP_SIZES[name]:
        options = SMALL if (name, tp) == ("tied", 2) else SMALL | WITHOUT_PROCESSORS
        assert run_generate(models[name], tmp_path, prompts, tp=tp, **options) == expected, f"tp {tp}"


@pytest.mark.parametrize(
    ("tp", "options"),
    [
        (1, {"max_running": 1, "max_step_tokens": 128}),  # alone, each prompt in one chunk
        (8, {"max_running": 4, "max_step_tokens": 64}),  # whole short prompts beside decodes
        (1, {"num_pages": 9}),  # pages of 16 tokens: about one request, so the others are preempted
        (8, {"num_pages": 9}),
    ],
    ids=["alone", "chunked", "preempted", "preempted at TP 8"],
)
def test_alone_chunked_and_preempted(tp: int, options: dict, models: dict[str, Path], tmp_path: Path) -> None:
    """One request at a time, one chunk or many, and a cache that is too small for all: the same tokens."""
    prompts = checkpoints.random_prompts((3, 40, 100, 120), vocab_size=320)
    expected = checkpoints.greedy(models["tied"], prompts, MAX_TOKENS)
    found = run_generate(models["tied"], tmp_path, prompts, tp=tp, **SMALL | WITHOUT_PROCESSORS | options)
    assert found == expected


def test_any_tp_size_that_divides_the_query_heads(tmp_path: Path) -> None:
    """6 query heads over 2 KV heads on 3 shards: the middle shard reads both KV heads."""
    model = checkpoints.save_checkpoint(tmp_path / "model", num_attention_heads=6, num_key_value_heads=2)
    prompts = checkpoints.random_prompts((5, 70), vocab_size=320)
    expected = checkpoints.greedy(model, prompts, MAX_TOKENS)
    for tp in (3, 6):
        assert run_generate(model, tmp_path, prompts, tp=tp, **SMALL, **WITHOUT_PROCESSORS) == expected


@pytest.mark.parametrize("is_changed", [False, True], ids=["equal", "different"])
def test_a_stored_head_of_a_tied_model(is_changed: bool, tmp_path: Path) -> None:
    """Hugging Face uses a stored head that differs from the embedding, whatever config.json says."""
    model = checkpoints.save_checkpoint(tmp_path / "model")
    prompts = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320)
    tied = checkpoints.greedy(model, prompts, MAX_TOKENS)
    checkpoints.add_head(model, is_changed=is_changed)
    expected = checkpoints.greedy(model, prompts, MAX_TOKENS)
    assert (expected == tied) != is_changed
    assert run_generate(model, tmp_path, prompts, tp=2, **SMALL, **WITHOUT_PROCESSORS) == expected
    convert(model, tmp_path / "orbax", devices=jax.devices("cpu"))
    assert read_model(tmp_path / "orbax" / "config.json").is_tied != is_changed
    assert run_generate(tmp_path / "orbax", tmp_path, prompts, tp=2, **SMALL, **WITHOUT_PROCESSORS) == expected


@pytest.mark.parametrize("name", ["tied", "untied_2_kv_heads", "yarn"])
@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("has_statistics_apart", [False, True], ids=["fused", "apart"])
def test_hidden_states_layer_by_layer(
    name: str, tp: int, has_statistics_apart: bool, models: dict[str, Path], every_case: bool
) -> None:
    once = {("tied", 8), ("untied_2_kv_heads", 1), ("yarn", 4)}
    if has_statistics_apart and (name, tp) not in once and not every_case:
        pytest.skip("each shape and each TP size once")
    prompt = checkpoints.random_prompts((130,), vocab_size=320)[0]
    expected_layers, expected_logits = checkpoints.hidden_states(models[name], prompt)
    layers, logits = _our_hidden_states(models[name], prompt, tp, has_statistics_apart)
    assert len(layers) == len(expected_layers)
    for ours, theirs in zip(layers, expected_layers, strict=True):
        assert _relative_error(ours, theirs.numpy()) < 1e-4
    assert _relative_error(logits[:, : expected_logits.shape[1]], expected_logits.numpy()) < 1e-4


def _relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _our_hidden_states(
    directory: Path, prompt: list[int], tp: int, has_statistics_apart: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Every layer's output and the logits of one prompt, computed layer by layer with the model's own methods."""
    config = read_model(directory / "config.json")
    mesh = make_mesh(tp)
    sizes = {name: getattr(config, name) for name in ("num_query_heads", "num_kv_heads", "vocab_size", "mlp_dim")}
    layout = shard_layout(num_shards=tp, **sizes)
    structure, params = load_model(directory, config, layout, mesh, jnp.dtype("float32"))
    page_size = 16
    num_pages = -(-len(prompt) // page_size)
    cache = jnp.zeros((config.num_layers, num_pages, layout.num_groups, 2, page_size, config.head_dim))
    batch = PagedBatch(
        positions=jnp.arange(len(prompt)),
        token_request=jnp.zeros(len(prompt), jnp.int32),
        page_table=jnp.arange(num_pages)[None, ::-1],
    )

    def forward(params: nnx.State, cache: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        model = nnx.merge(structure, params)
        cos, sin = rotation(config.rope, config.head_dim, batch.positions)
        context = StepContext(batch, cos, sin, implementation("reference"), has_statistics_apart=has_statistics_apart)
        x, outputs = model.embed(jnp.asarray(prompt)), []
        for index in range(config.num_layers):
            x, cache = model.layer(index)(x, cache, index, context)
            outputs.append(x)
        return outputs, model.logits(x)

    is_weight = {"is_leaf": lambda leaf: isinstance(leaf, nnx.Variable)}
    specs = jax.tree.map(lambda weight: weight.replace(partition_spec(weight.axes)), params, **is_weight)
    kv_heads = partition_spec((None, None, "kv_heads", None, None, None))
    vocab = partition_spec((None, "vocab"))
    program = jax.shard_map(
        forward, mesh=mesh, in_specs=(specs, kv_heads), out_specs=(PartitionSpec(), vocab), check_vma=False
    )
    outputs, logits = jax.jit(program)(params, cache)
    return [np.asarray(output) for output in outputs], np.asarray(logits)


def test_model_config_has_no_defaults() -> None:
    """But for what was noted while config.json was read, which is no part of the model."""
    of_model = [field for field in dataclasses.fields(ModelConfig) if field.compare]
    assert all(field.default is dataclasses.MISSING for field in of_model)
