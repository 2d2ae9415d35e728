"""Tests the demo model's draft head: its files, and how often it is right on a text that neither has seen."""

import jax.numpy as jnp
import pytest

pytest.importorskip("optax")

from meshserve.deploy.demo.export import load_parameters
from meshserve.deploy.demo.head_network import load_head
from meshserve.deploy.demo.network import NetworkConfig
from meshserve.deploy.demo.train_head import HeadConfig, Shapes, head_config, measures
from meshserve.runtime.draft.heads.eagle3_config import read_eagle3
from meshserve.runtime.model_files.model_config import read_json
from meshserve.runtime.text.tokenizer import open_tokenizer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY, DEMO_HEAD, find_model
from meshserve.runtime.weights.registry import read_model

from .test_demo_model import VERSE

HEAD = find_model(DEMO_HEAD).small


def test_the_files_are_small_and_are_what_training_writes():
    assert sum(path.stat().st_size for path in HEAD.iterdir()) < 2_000_000
    raw = read_json(HEAD / "config.json")
    assert raw == head_config(NetworkConfig(), HeadConfig())
    config = read_eagle3(raw, read_model(DEMO_DIRECTORY / "config.json"))
    assert config.layers_read == (1, 3, 5) and config.layer.vocab_size == 1024


def test_most_draft_tokens_for_unseen_verse_are_right():
    head, token_ids = load_head(HEAD)
    served = {name: jnp.asarray(value, jnp.float32) for name, value in load_parameters(DEMO_DIRECTORY).items()}
    shapes = Shapes(NetworkConfig(), HeadConfig(draft_tokens=3), jnp.asarray(token_ids))
    ids = jnp.asarray([open_tokenizer(DEMO_DIRECTORY).encode(VERSE)], jnp.int32)
    found = measures(head, served, ids, shapes)
    assert float(found.agreement.min()) > 0.4 and float(found.overlap.min()) > 0.5, found
