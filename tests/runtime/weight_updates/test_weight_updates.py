"""Weights are replaced in a running engine: greedy tokens are transformers' on the new weights, or nothing changes."""

import functools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from meshserve import LLM, SamplingParams
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.request import Output
from meshserve.runtime.weight_updates import assembly, weight_sources, weight_updater
from meshserve.runtime.weight_updates.assembly import overwriter
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints
from tests.trainer_trees import tunix_tree
from tests.waiting import WAIT_SECONDS, wait_for

pytestmark = pytest.mark.usefixtures("greedy_programs")

# A vocabulary and an intermediate size that no TP size divides, and TP 8 repeats KV heads.
DENSE: dict[str, Any] = {
    "vocab_size": 333, "intermediate_size": 90, "num_hidden_layers": 2, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE: dict[str, Any] = {"num_hidden_layers": 2, **checkpoints.TINY_EXPERTS}
SMALL: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "cache_dir": "",
    "show_progress": False, "logits_processors": False,
}  # fmt: skip
PROMPTS = checkpoints.random_prompts((3, 20, 41), vocab_size=320)
MAX_TOKENS = 8
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
NUM_LONG = 24
LONG = SamplingParams(max_tokens=NUM_LONG, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of three models with the same config and other weights."""
    paths = [tmp_path_factory.mktemp(f"dense{seed}") for seed in range(3)]
    return [checkpoints.save_checkpoint(path, seed=seed, **DENSE) for seed, path in enumerate(paths)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp(f"mixture{seed}") for seed in range(2)]
    return [checkpoints.save_checkpoint(path, seed=seed, **MIXTURE) for seed, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm(dense: list[Path]) -> Iterator[LLM]:
    with LLM(dense[0], tp=4, **SMALL) as llm:
        yield llm


def generated(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(directory: Path) -> list[list[int]]:
    return reference(directory, MAX_TOKENS)


@functools.cache
def reference(directory: Path, max_tokens: int) -> list[list[int]]:
    return checkpoints.greedy(directory, PROMPTS, max_tokens)


def tensors(directory: Path) -> dict[str, Any]:
    return {name: jnp.asarray(array) for name, array in load_file(directory / "model.safetensors").items()}


def fully_sharded(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays on other devices than the engine's first ones, sharded along any axis that divides."""
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(8), ("fsdp",))

    def spec(shape: tuple[int, ...]) -> PartitionSpec:
        axis = next((axis for axis, length in enumerate(shape) if length % 8 == 0), None)
        return PartitionSpec(*("fsdp" if index == axis else None for index in range(len(shape))))

    return {name: jax.device_put(array, NamedSharding(mesh, spec(array.shape))) for name, array in arrays.items()}


def own_state(directory: Path) -> nnx.State:
    """Returns the weights as a state of our model for one device."""
    config = read_model(directory / "config.json")
    return load_model(directory, config, model_layout(config, 1), make_mesh(1), jnp.dtype(jnp.float32))[1]


def test_every_form_of_weights_gives_the_tokens_of_hugging_face(llm: LLM, dense: list[Path], tmp_path: Path):
    convert(dense[2], tmp_path / "orbax", devices=jax.devices("cpu"))
    forms = [
        (1, tensors(dense[1])),
        (2, fully_sharded(tensors(dense[2]))),
        (0, load_file(dense[0] / "model.safetensors")),
        (1, own_state(dense[1])),
        (2, tunix_tree(fully_sharded(tensors(dense[2])), num_heads=(8, 4))),
        (1, maxtext_tree(fully_sharded(tensors(dense[1])), num_heads=(8, 4))),
        (0, str(dense[0])),
        (2, tmp_path / "orbax"),
    ]
    wanted = [expected(directory) for directory in dense]
    assert generated(llm) == wanted[0] and llm.weight_version == "0"
    for number, (model, source) in enumerate(forms, start=1):
        update = llm.update_weights(source)
        assert (update.version, llm.weight_version) == (str(number), str(number))
        assert generated(llm) == wanted[model], f"form {number}"
    assert wanted[0] != wanted[1] != wanted[2]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_at_every_tp_size(tp: int, dense: list[Path]):
    with LLM(dense[0], tp=tp, **SMALL) as llm:
        llm.update_weights(fully_sharded(tensors(dense[1])), version="one")
        assert generated(llm) == expected(dense[1])


@pytest.mark.parametrize(("tp", "by_expert"), [(1, False), (4, False), (4, True)])
def test_mixtures_of_experts(tp: int, by_expert: bool, mixture: list[Path]):
    with LLM(mixture[0], tp=tp, expert_parallel=by_expert, **SMALL) as llm:
        given = tensors(mixture[1])
        llm.update_weights(given)
        assert generated(llm) == (wanted := expected(mixture[1]))
        llm.update_weights(tensors(mixture[0]))
        llm.update_weights(fused_experts(given))
        assert generated(llm) == wanted
        llm.update_weights(own_state(mixture[0]))
        assert generated(llm) == expected(mixture[0])
        llm.update_weights(tunix_tree(given, num_heads=(8, 4)))
        assert generated(llm) == wanted
        llm.update_weights(maxtext_tree(tensors(mixture[0]), num_heads=(8, 4)))
        assert generated(llm) == expected(mixture[0])


def fused_experts(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the same weights with the matrices of a layer's experts in one array, as transformers holds them."""
    fused = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in range(MIXTURE["num_hidden_layers"]):
        prefix, experts = f"model.layers.{layer}.mlp.experts", range(MIXTURE["num_experts"])
        gate, up, down = (
            jnp.stack([arrays[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in experts])
            for kind in ("gate", "up", "down")
        )
        fused |= {f"{prefix}.gate_up_proj": jnp.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    return fused


def maxtext_tree(arrays: dict[str, Any], num_heads: tuple[int, int]) -> dict[str, Any]:
    """Returns the weights as MaxText holds them with scanned layers, as its conversion of checkpoints does."""
    tunix = tunix_tree(arrays, num_heads)
    layers = [
        {
            "pre_self_attention_layer_norm": {"scale": layer["input_layernorm"]["w"]},
            "post_self_attention_layer_norm": {"scale": layer["post_attention_layernorm"]["w"]},
            "self_attention": {
                **{
                    name: {"kernel": layer["attn"][f"{name[0]}_proj"]["w"]} for name in ("query", "key", "value", "out")
                },
                **{f"{name}_norm": {"scale": layer["attn"][f"{name[0]}_norm"]["w"]} for name in ("query", "key")},
            },
            "moe_block" if "router" in layer["mlp"] else "mlp": {
                **{
                    {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}[name]: matrix
                    for name, matrix in layer["mlp"].items()
                    if name != "router"
                },
                **({"gate": layer["mlp"]["router"]} if "router" in layer["mlp"] else {}),
            },
        }
        for layer in tunix["layers"].values()
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *layers)
    decoder = {"layers": stacked, "decoder_norm": {"scale": tunix["final_norm"]["w"]}}
    if "lm_head" in tunix:
        decoder["logits_dense"] = {"kernel": tunix["lm_head"]["w"]}
    embedder = {"embedding": tunix["embedder"]["input_embedding"]}
    return {"params": {"params": {"decoder": decoder, "token_embedder": embedder}}}


def test_a_part_of_the_weights(llm: LLM, dense: list[Path], tmp_path: Path):
    """One of three tensors of a fused parameter, in one layer, and a table."""
    llm.update_weights(dense[0])
    first, second = load_file(dense[0] / "model.safetensors"), load_file(dense[1] / "model.safetensors")
    names = ("model.layers.1.self_attn.k_proj.weight", "lm_head.weight")
    changed = {name: second[name] for name in names}
    llm.update_weights(changed, partial=True)
    mixed = checkpoints.save_checkpoint(tmp_path, seed=0, **DENSE)
    checkpoints.replace_tensors(mixed, {**first, **changed})
    assert generated(llm) == checkpoints.greedy(mixed, PROMPTS, MAX_TOKENS) != expected(dense[0])


@pytest.mark.parametrize("form", ["hugging face", "maxtext"])
def test_donated_arrays_are_deleted_as_they_are_used(
    form: str, llm: LLM, dense: list[Path], monkeypatch: pytest.MonkeyPatch
):
    llm.update_weights(dense[0])
    given = fully_sharded(tensors(dense[1])) if form == "hugging face" else maxtext_tree(tensors(dense[1]), (8, 4))
    llm.update_weights(given)
    assert not any(array.is_deleted() for array in jax.tree.leaves(given)), "only if asked"
    llm.update_weights(dense[0])
    num_left: list[int] = []

    def counting(*arguments: Any) -> jax.Array:
        num_left.append(sum(not array.is_deleted() for array in jax.tree.leaves(given)))
        return assembly.assembled(*arguments)

    monkeypatch.setattr(weight_sources, "assembled", counting)
    llm.update_weights(given, donate=True)
    assert all(array.is_deleted() for array in jax.tree.leaves(given))
    assert num_left == sorted(num_left, reverse=True) and len(set(num_left)) > 5, "one by one"
    assert generated(llm) == expected(dense[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "1 missing.*model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.1.mlp.extra.weight": (90, 48)}, "1 not part of this model: model.layers.1.mlp.extra.weight"),
        ({"model.norm.weight": (47,)}, r"1 of another shape: model.norm.weight is \(47,\), the model has \(48,\)"),
        ({"model.norm.weight": np.zeros(48, np.int32)}, "of a dtype other than .*model.norm.weight is int32"),
        ({"model.norm.weight": np.full(48, np.nan, np.float32)}, "NaN or infinite numbers would come into norm"),
        ({"model.layers.1.mlp.down_proj.weight": np.full((48, 90), np.inf, np.float32)}, "into layers.mlp.down"),
    ],
)
def test_bad_weights_change_nothing(change: dict[str, Any], message: str, llm: LLM, dense: list[Path]):
    llm.update_weights(dense[0], version="good")
    given = load_file(dense[1] / "model.safetensors")
    for name, value in change.items():
        given.pop(name, None)
        if value is not None:
            given[name] = np.zeros(value, np.float32) if isinstance(value, tuple) else value
    with pytest.raises(InvalidRequestError, match=message):
        llm.update_weights(given, version="bad")
    assert llm.weight_version == "good"
    assert generated(llm) == expected(dense[0])


def test_other_mistakes_are_named(llm: LLM, dense: list[Path], mixture: list[Path], tmp_path: Path):
    for arguments, message in [
        ({"source": {"w": np.zeros(1, np.float32)}}, "got w; allowed are Hugging Face's names, such as"),
        ({"source": tmp_path / "none"}, "is no directory"),
        ({"source": dense[1], "running": "stop"}, "running: got 'stop'; allowed are continue, finish, abort"),
        ({"source": dense[1], "version": ""}, "version: has 0 characters"),
        ({"source": dense[1], "partial": True}, "partial: a directory must hold all weights"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            llm.update_weights(**arguments)
    with pytest.raises(InvalidRequestError, match="another model than the one that is served"):
        llm.update_weights(mixture[0])


def test_without_room_the_cache_makes_it(llm: LLM, dense: list[Path], monkeypatch: pytest.MonkeyPatch):
    """The new weights are copied into the memory of the old ones; a failure before that leaves those in place."""
    llm.update_weights(tensors(dense[0]), version="before")
    monkeypatch.setattr(weight_updater, "has_room_for", lambda mesh, num_bytes: False)
    runner = llm._launched.engine.runner
    places = [array.unsafe_buffer_pointer() for array in shards(runner)]
    damaged = {**tensors(dense[1]), "model.norm.weight": jnp.full(48, jnp.nan)}
    with pytest.raises(InvalidRequestError, match="NaN"):
        llm.update_weights(damaged)
    assert generated(llm) == expected(dense[0]) and llm.weight_version == "before"
    llm.update_weights(tensors(dense[1]), version="after")
    assert generated(llm) == expected(dense[1]) and llm.weight_version == "after"
    assert [array.unsafe_buffer_pointer() for array in shards(runner)] == places, "not in place"


@pytest.mark.parametrize("has_room", [True, False])
def test_an_update_that_breaks_off_changes_nothing(
    has_room: bool, llm: LLM, dense: list[Path], monkeypatch: pytest.MonkeyPatch
):
    llm.update_weights(tensors(dense[0]), version="before")
    monkeypatch.setattr(weight_updater, "has_room_for", lambda mesh, num_bytes: has_room)
    num_left = iter(range(3, -1, -1))

    def breaking_off(*arguments: Any) -> jax.Array:
        if not next(num_left):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.1GiB")
        return assembly.assembled(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(weight_sources, "assembled", breaking_off)
        with pytest.raises(MemoryError, match="the devices have no room for the new weights"):
            llm.update_weights(tensors(dense[1]))
    assert generated(llm) == expected(dense[0]) and llm.weight_version == "before"
    audited(llm)


def shards(runner: Any) -> list[jax.Array]:
    return [shard.data for array in jax.tree.leaves(runner.params) for shard in array.addressable_shards]


def test_overwriting_allocates_nothing():
    old = jax.device_put(jnp.zeros((4, 8)), NamedSharding(make_mesh(2), PartitionSpec("tensor")))
    new = jax.device_put(jnp.ones((4, 8)), old.sharding)
    places = [shard.data.unsafe_buffer_pointer() for shard in old.addressable_shards]
    placed = overwriter(old)(old, new)
    assert [shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards] == places
    assert (placed == new).all() and old.is_deleted()


class Running:
    """Samples in another thread, which have some tokens and stand still when the block begins."""

    def __init__(self, llm: LLM, pool: ThreadPoolExecutor):
        self._llm, self._pool, self._engine = llm, pool, llm._launched.engine
        self._go_on, self._stands_still, self._num_tokens = threading.Event(), threading.Event(), 0

    def __enter__(self) -> "Running":
        deliver = self._engine._deliver

        def stand_still(outputs: Sequence[Output]) -> None:
            deliver(outputs)
            self._num_tokens += sum(len(output.token_ids) for output in outputs)
            if self._num_tokens >= 3 * len(PROMPTS):
                self._engine._deliver = deliver
                self._stands_still.set()
                assert self._go_on.wait(WAIT_SECONDS)

        self._engine._deliver = stand_still
        self._future = self._pool.submit(self._llm.generate, list(map(list, PROMPTS)), LONG, use_tqdm=False)
        assert self._stands_still.wait(WAIT_SECONDS)
        return self

    def update(self, *arguments: Any, **options: Any) -> None:
        """Updates the weights, while the samples go on once the engine has been told to stop between two steps."""
        updating = self.begin_update(*arguments, **options)
        self._go_on.set()
        updating.result()

    def begin_update(self, *arguments: Any, **options: Any) -> "Future[Any]":
        updating = self._pool.submit(self._llm.update_weights, *arguments, **options)
        wait_for(lambda: self._engine._pause is not None or updating.done())
        return updating

    def go_on(self) -> None:
        self._go_on.set()

    def __exit__(self, *exc_info: object) -> None:
        self._go_on.set()
        self.outputs = [output.outputs[0] for output in self._future.result()]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def audited(llm: LLM) -> None:
    """Checks that no page and no request is lost."""
    engine = llm._launched.engine
    with engine._changed:
        engine._scheduler.audit()
        assert not engine._scheduler.requests and not engine._open._spans
    load = engine.load()
    assert load.num_free_pages == load.num_pages


def test_running_requests_continue_with_the_new_weights(llm: LLM, dense: list[Path], pool: ThreadPoolExecutor):
    llm.update_weights(dense[0], version="old")
    before = reference(dense[0], NUM_LONG)
    with Running(llm, pool) as running:
        running.update(tensors(dense[1]), version="new", running="continue")
    for prompt, sample, old in zip(PROMPTS, running.outputs, before, strict=True):
        assert sample.finish_reason == "length" and len(sample.token_ids) == NUM_LONG
        assert [span.version for span in sample.weight_spans] == ["old", "new"]
        num_old = sample.weight_spans[0].num_tokens
        assert sum(span.num_tokens for span in sample.weight_spans) == NUM_LONG
        assert list(sample.token_ids[:num_old]) == old[:num_old]
        known = [*prompt, *sample.token_ids[:num_old]]
        assert checkpoints.greedy(dense[1], [known], NUM_LONG - num_old) == [list(sample.token_ids[num_old:])]
    audited(llm)


def test_running_requests_may_finish_first(llm: LLM, dense: list[Path], pool: ThreadPoolExecutor):
    llm.update_weights(dense[0], version="old")
    with Running(llm, pool) as running:
        updating = running.begin_update(tensors(dense[1]), version="new", running="finish")
        late = pool.submit(generated, llm)
        shares = llm._launched.engine._scheduler._shares
        wait_for(lambda: shares.num_held == len(PROMPTS))
        running.go_on()
        updating.result()
    assert late.result() == expected(dense[1])
    assert [list(sample.token_ids) for sample in running.outputs] == reference(dense[0], NUM_LONG)
    assert {span.version for sample in running.outputs for span in sample.weight_spans} == {"old"}
    audited(llm)


def test_running_requests_may_be_aborted(llm: LLM, dense: list[Path], pool: ThreadPoolExecutor):
    llm.update_weights(dense[0], version="old")
    with Running(llm, pool) as running:
        running.update(tensors(dense[1]), running="abort")
    whole = reference(dense[0], NUM_LONG)
    for sample, tokens in zip(running.outputs, whole, strict=True):
        assert (sample.finish_reason, sample.error) == ("cancelled", "the weights of the model were replaced")
        assert list(sample.token_ids) == tokens[: len(sample.token_ids)] != []
    assert generated(llm) == expected(dense[1])
    audited(llm)


def test_an_update_compiles_no_step_and_the_next_compiles_nothing(llm: LLM, dense: list[Path]):
    programs = dict(llm._launched.engine.runner._programs)  # type: ignore[attr-defined]
    llm.update_weights(tensors(dense[0]))
    generated(llm)
    with jax.log_compiles(True), jax.check_tracer_leaks(False):
        compiles: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(listener := lambda name, *_, **__: compiles.append(name))
        try:
            llm.update_weights(tensors(dense[1]))
            generated(llm)
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
    assert not [name for name in compiles if "compile" in name]
    assert llm._launched.engine.runner._programs == programs  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", ["fp8-block", "int4"])
def test_a_quantized_engine_quantizes_again(scheme: str, tmp_path: Path):
    sizes = {**DENSE, "hidden_size": 128, "intermediate_size": 128}
    first, second = (checkpoints.save_checkpoint(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1))
    with LLM(second, tp=2, quantize=scheme, **SMALL) as other:
        wanted = generated(other)
    with LLM(first, tp=2, quantize=scheme, **SMALL) as llm:
        assert generated(llm) != wanted
        llm.update_weights(tensors(second))
        assert generated(llm) == wanted
        with pytest.raises(InvalidRequestError, match="a quantized model takes all weights at once"):
            llm.update_weights(tensors(first), partial=True)
        llm.update_weights(first)
        assert generated(llm) != wanted
