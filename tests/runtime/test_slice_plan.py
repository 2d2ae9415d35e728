"""`meshserve plan`, the arithmetic."""

import json

import jax.numpy as jnp
import pytest

from meshserve.runtime.cli import main
from meshserve.runtime.model import abstract_model
from meshserve.runtime.model_sizes import named_model
from meshserve.runtime.slice_plan import weight_bytes
from meshserve.sharding.layout import shard_layout


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["plan", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_device_holds_adds_up(capsys):
    found = plan(capsys, "--model=qwen3-8b", "--target=v6e:2x4", "--page-size=128")
    assert found["tp"] == 8
    assert found["page_bytes"] == 36 * 1 * 2 * 128 * 128 * 2
    used = found["weight_bytes"] + found["scratch_bytes"] + found["max_pages"] * found["page_bytes"]
    assert 0 <= found["hbm_bytes"] - used < found["page_bytes"]
    assert found["served_pages"] < found["max_pages"]


def test_on_one_device_the_weights_are_the_whole_model():
    model = named_model("qwen3-0.6b")
    layout = shard_layout(
        num_shards=1,
        num_query_heads=model.num_query_heads,
        num_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        mlp_dim=model.mlp_dim,
    )
    assert abstract_model(model, layout, jnp.dtype("bfloat16"))
    assert weight_bytes(model, layout, jnp.dtype("bfloat16")) == 2 * model.num_params


def test_a_degree_of_its_own_and_a_directory(capsys):
    found = plan(capsys, "--model=demo", "--target=v5e:2x4", "--tp=4", "--num-pages=77")
    assert (found["tp"], found["served_pages"]) == (4, 77)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=qwen3-32b", "--target=v5e:2x2"], "15.3 GiB of weights on each of 4 devices of v5e:2x2"),
        (["--model=qwen3-8b", "--target=v6e-8"], "target is 'v6e-8'; it takes CHIP:SHAPE"),
        (["--model=qwen3-8b", "--target=v6e:4x4", "--tp=3"], "tp is 3, which does not divide"),
    ],
)
def test_what_cannot_be_is_explained(flags, message, capsys):
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err
