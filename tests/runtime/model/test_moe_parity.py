"""Mixture of experts: the same tokens as Hugging Face in float32, with experts split by tensor and by expert."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from meshserve.kernels import experts
from meshserve.kernels.paged_attention import PagedBatch, implementation
from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs, forward
from meshserve.runtime.weights import random_weights
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh, partition_spec
from tests import checkpoints
from tests.runtime.model.test_parity import run_generate

pytestmark = pytest.mark.usefixtures("greedy_programs")

PROMPT_LENGTHS = (1, 7, 33)
MAX_TOKENS = 12
PAGE_SIZE = 16

SHAPES = {
    "8_experts": {"num_hidden_layers": 2},
    "128_experts": {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 8, "norm_topk_prob": False,
        "num_hidden_layers": 2, "tie_word_embeddings": False,
    },
    # Neither the experts nor their intermediate size are multiples of 8.
    "12_experts_top_1": {
        "num_experts": 12, "num_experts_per_tok": 1, "moe_intermediate_size": 20, "norm_topk_prob": False,
        "num_hidden_layers": 2,
    },
    "dense_between": {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "num_experts": 16, "num_experts_per_tok": 4,
        "num_key_value_heads": 2,
    },
    "dense_first": {"num_hidden_layers": 3, "mlp_only_layers": [0], "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each shape."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: checkpoints.save_checkpoint(root / name, seed=index, **{**checkpoints.TINY_EXPERTS, **overrides})
        for index, (name, overrides) in enumerate(SHAPES.items())
    }


@pytest.fixture(scope="module")
def generated(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Prompts of each model, followed by what Hugging Face generates."""
    found = {}
    for name, directory in models.items():
        prompts = checkpoints.random_prompts(PROMPT_LENGTHS, vocab_size=320)
        outputs = checkpoints.greedy(directory, prompts, MAX_TOKENS)
        found[name] = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return found


EVERY_SPLIT = [(1, False), (2, False), (4, False), (8, False), (2, True), (4, True), (8, True)]
SOME_SPLITS = [(1, False), (8, False), (8, True)]
SPLITS = dict.fromkeys(SHAPES, SOME_SPLITS) | {"12_experts_top_1": EVERY_SPLIT}  # padded at some, not at others


@pytest.mark.parametrize(
    ("name", "num_devices", "is_by_expert"),
    [(name, *split) for name, splits in SPLITS.items() for split in splits],
)
def test_same_tokens_as_hugging_face(name, num_devices, is_by_expert, models, generated):
    """All positions in one step: if each best token is the next one of the text, greedy decoding generates the text."""
    chosen = best_tokens(models[name], generated[name], num_devices, is_by_expert=is_by_expert)
    for text, best, length in zip(generated[name], chosen, PROMPT_LENGTHS, strict=True):
        assert best[length - 1 : -1] == text[length:]


@pytest.mark.parametrize("backend", ["reference", "tpu_interpreted"])
def test_the_other_implementations_choose_the_same_tokens(backend, models, generated):
    name = "8_experts"
    assert best_tokens(models[name], generated[name], 4, is_by_expert=True, backend=backend) == best_tokens(
        models[name], generated[name], 1
    )


def best_tokens(
    directory: Path,
    texts: list[list[int]],
    num_devices: int,
    *,
    is_by_expert: bool = False,
    backend: str = "xla",
) -> list[list[int]]:
    """Returns the best token after each token of the texts, which are requests of one step with padding at its end."""
    config = read_model(directory / "config.json")
    mesh, layout = make_mesh(num_devices), model_layout(config, num_devices, expert_parallel=is_by_expert)
    structure, params = load_model(directory, config, layout, mesh, jnp.dtype("float32"))
    num_pages = -(-max(map(len, texts)) // PAGE_SIZE)
    padding = [-1] * 3
    positions = [position for text in texts for position in range(len(text))] + padding
    requests = [index for index, text in enumerate(texts) for _ in text] + [0] * len(padding)
    token_ids = jnp.asarray([token for text in texts for token in text] + [0] * len(padding))
    pages = np.random.default_rng(0).permutation(len(texts) * num_pages).reshape(len(texts), num_pages)
    batch = PagedBatch(jnp.asarray(positions), jnp.asarray(requests), jnp.asarray(pages, jnp.int32))
    shape = (config.num_layers, len(texts) * num_pages, layout.num_groups, 2, PAGE_SIZE, config.head_dim)
    kernels = Kernels(attend=implementation("reference"), experts=experts.implementation(backend))

    def logits(params: nnx.State, cache: jax.Array) -> jax.Array:
        model = nnx.merge(structure, params)
        step = StepInputs(token_ids, batch, kernels.products, wanted=jnp.arange(len(token_ids)))
        return model.logits(forward(model, kernels, cache, step).wanted)

    program = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(specs_of(params), partition_spec((None, None, "kv_heads", None, None, None))),
        out_specs=PartitionSpec(None, "tensor"),
        check_vma=False,
    )
    best = jnp.argmax(jax.jit(program)(params, jnp.zeros(shape))[:, : config.vocab_size], axis=1).tolist()
    starts = np.cumsum([0, *map(len, texts)])
    return [best[first:last] for first, last in zip(starts, starts[1:], strict=False)]


@pytest.mark.parametrize(
    ("name", "tp", "is_by_expert", "max_running"),
    [("8_experts", 8, False, 4), ("8_experts", 4, True, 4), ("dense_between", 2, True, 1)],
)
def test_alone_in_a_batch_chunked_and_preempted(name, tp, is_by_expert, max_running, models, generated, tmp_path):
    """Through `meshserve generate`: one request at a time, or chunks beside decodes in a cache too small for all."""
    prompts = [text[:length] for text, length in zip(generated[name], PROMPT_LENGTHS, strict=True)]
    expected = [text[length:] for text, length in zip(generated[name], PROMPT_LENGTHS, strict=True)]
    # Few shapes, because compiling them is what takes the time; 5 pages hold the longest request and another.
    options = {"max_running": max_running, "max_step_tokens": 4, "page_size": PAGE_SIZE, "num_pages": 5}
    options |= {"max_context": 64, "logits_processors": False, "tp": tp, "expert_parallel": is_by_expert}
    assert run_generate(models[name], tmp_path, prompts, **options) == expected


@pytest.mark.parametrize("name", ["8_experts", "12_experts_top_1"])
def test_fused_decode_layers(name, models, generated, tmp_path):
    """The reference of the fused layers chooses the same tokens."""
    prompts = [text[:length] for text, length in zip(generated[name], PROMPT_LENGTHS, strict=True)]
    expected = [text[length:] for text, length in zip(generated[name], PROMPT_LENGTHS, strict=True)]
    options = {"max_running": 2, "max_step_tokens": 16, "page_size": PAGE_SIZE, "num_pages": 24, "max_context": 64}
    options |= {"logits_processors": False, "decode_layers": "reference"}
    assert run_generate(models[name], tmp_path, prompts, **options) == expected


@pytest.mark.parametrize("name", ["12_experts_top_1", "dense_between"])
def test_an_orbax_checkpoint_restores_on_any_mesh(name, models, generated, tmp_path):
    convert(models[name], tmp_path, devices=jax.devices("cpu"))
    for num_devices, is_by_expert in ((1, False), (4, False), (8, True)):
        load = partial(_loaded, num_devices=num_devices, is_by_expert=is_by_expert)
        jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(models[name]))


def _loaded(directory: Path, num_devices: int, is_by_expert: bool) -> nnx.State:
    config = read_model(directory / "config.json")
    layout = model_layout(config, num_devices, expert_parallel=is_by_expert)
    return load_model(directory, config, layout, make_mesh(num_devices), jnp.dtype("float32"))[1]


def test_random_weights_are_drawn_layer_by_layer_and_keep_tokens_apart(models, monkeypatch):
    config = read_model(models["128_experts"] / "config.json")
    monkeypatch.setattr(random_weights, "_MOST_ELEMENTS", 1 << 10)
    _, params = random_weights.random_model(config, model_layout(config, 2), make_mesh(2), jnp.dtype("float32"))
    matrices = params["layers"]["experts"]["gate_up"].get_value()
    assert len({float(jnp.sum(layer)) for layer in matrices}) == config.num_layers
    assert float(jnp.std(matrices)) == pytest.approx(0.02, rel=0.05)
    assert float(jnp.std(params["embedding"].get_value())) == pytest.approx(1.0, rel=0.05)


def test_expert_parallelism_of_a_dense_model_is_refused(tmp_path):
    model = checkpoints.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="expert_parallel is set, but a qwen3 model has no experts"):
        model_layout(read_model(model / "config.json"), 2, expert_parallel=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; allowed is 1 to num_experts .8."),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        ({"mlp_only_layers": [0, 1]}, "leave no layer with experts"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; allowed is true or false"),
        ({"moe_intermediate_size": 24.0}, "moe_intermediate_size is 24.0; allowed is a whole number"),
        ({"qkv_bias": True}, "qkv_bias is True; meshserve implements only False"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64; meshserve implements 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message, models, tmp_path):
    raw = json.loads((models["8_experts"] / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**raw, **changes}.items() if value is not None}))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model(path)


def test_published_options_without_effect_are_accepted(models, tmp_path):
    raw = json.loads((models["8_experts"] / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    raw |= {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model(tmp_path / "config.json").experts.num_experts == 8
