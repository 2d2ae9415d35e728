"""Tests the demo model: the contents of its directory, the parsing of the plays, and the likelihood of their text."""

import json
import math
import random

import numpy as np
import pytest

pytest.importorskip("transformers")

from meshserve.deploy.demo.corpus import parse_play
from meshserve.deploy.demo.documents import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
    dialogues,
    raw_document,
    train_tokenizer,
    turns,
)
from meshserve.deploy.demo.export import load_parameters
from meshserve.deploy.demo.network import NetworkConfig, forward, parameter_shapes, token_losses
from meshserve.runtime.weights.locate import DEMO_DIRECTORY

MAX_DIRECTORY_BYTES = 8_000_000

# From a play that was held out from training.
VERSE = """MACBETH:
Is this a dagger which I see before me,
The handle toward my hand? Come, let me clutch thee:--
I have thee not, and yet I see thee still.
Art thou not, fatal vision, sensible
To feeling as to sight? or art thou but
A dagger of the mind, a false creation,
Proceeding from the heat-oppressed brain?
"""

PLAY = """THE PLAY

by William Shakespeare


PERSONS REPRESENTED.

ANNE, a lady.


ACT 1.

SCENE 2.--A street.

[Enter ANNE and
BEN.]

ANNE.
Good   morrow, sir.
[Aside.] He looks pale.

[Thunder.]

How now!

BEN.
Madam.

[Exit.]

ANNE.  Farewell.

ANNE.
Farewell again.

BEN.
Alas.

THE END
"""


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_DIRECTORY)


def test_directory_is_small_and_complete():
    names = {path.name for path in DEMO_DIRECTORY.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in DEMO_DIRECTORY.iterdir()) <= MAX_DIRECTORY_BYTES


def test_config_describes_a_small_qwen3():
    config = json.loads((DEMO_DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "bfloat16"
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 32)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["max_position_embeddings"] == 1024


def test_weights_match_the_config():
    parameters = load_parameters(DEMO_DIRECTORY)
    assert {name: value.shape for name, value in parameters.items()} == parameter_shapes(NetworkConfig())
    assert sum(value.size for value in parameters.values()) == 3_050_304


def test_generation_ends_at_both_end_tokens(tokenizer):
    generation = json.loads((DEMO_DIRECTORY / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids([END_OF_TEXT, IM_END])
    assert generation["do_sample"] is True


@pytest.mark.parametrize(
    "text", [VERSE, "  two  spaces\n\n\tand a tab ", "naïve café — 漢字 🙂", "", "'Tis I'll we're 1599"]
)
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(token_id < 2048 for token_id in ids)


def test_special_tokens_are_single_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer(f"a{IM_END}b").input_ids.count(2) == 1
    assert tokenizer.decode(tokenizer(f"a{IM_END}b").input_ids, skip_special_tokens=True) == "ab"


def test_chat_template_renders(tokenizer):
    messages = [{"role": "system", "content": "A heath."}, {"role": "user", "content": "Who's there?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        f"{IM_START}system\nA heath.{IM_END}\n{IM_START}user\nWho's there?{IM_END}\n{IM_START}assistant\n"
    )
    answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "I."}], tokenize=False)
    assert answered == rendered + f"I.{IM_END}\n"


def test_play_is_parsed_into_scenes_speeches_and_directions():
    (scene,) = parse_play("the_play", PLAY).scenes
    assert raw_document(scene) == (
        "THE PLAY. ACT I. SCENE II. A street.\n\n"
        "[Enter ANNE and BEN.]\n\n"
        "ANNE:\nGood morrow, sir.\n[Aside.] He looks pale.\n[Thunder.]\nHow now!\n\n"
        "BEN:\nMadam.\n\n"
        "[Exit.]\n\n"
        "ANNE:\nFarewell.\n\n"
        "ANNE:\nFarewell again.\n\n"
        "BEN:\nAlas.\n"
    )
    assert turns(scene) == [
        "Good morrow, sir.\nHe looks pale.\nHow now!",
        "Madam.",
        "Farewell.\nFarewell again.",
        "Alas.",
    ]


def test_dialogues_follow_the_chat_template_and_swap_roles():
    (scene,) = parse_play("the_play", PLAY).scenes
    chats = list(dialogues(scene, random.Random(1)))
    as_user = "".join(chats).count(f"{IM_START}user\nMadam.{IM_END}\n")
    as_assistant = "".join(chats).count(f"{IM_START}assistant\nMadam.{IM_END}\n")
    assert (as_user, as_assistant) == (1, 1)
    assert (DEMO_DIRECTORY / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_tokenizer_training_covers_every_byte():
    trained = train_tokenizer(["O Romeo, Romeo"], vocabulary_tokens=300)
    assert [trained.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert trained.decode(trained.encode("\x00é漢").ids) == "\x00é漢"


def test_held_out_verse_is_likely(tokenizer):
    """Our forward pass (without torch) is well below ln(2048) = 7.62 nats per token, the loss of a uniform guess."""
    ids = np.asarray([[0, *tokenizer(VERSE).input_ids]])
    losses = token_losses(forward(load_parameters(DEMO_DIRECTORY), ids[:, :-1], NetworkConfig()), ids[:, 1:])
    assert float(losses.mean()) < 0.6 * math.log(2048)


def test_transformers_gives_the_same_logits_and_a_low_loss(tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_DIRECTORY, dtype=torch.float32).eval()
    ids = np.asarray([[0, *tokenizer(VERSE).input_ids]])
    with torch.no_grad():
        output = model(torch.tensor(ids), labels=torch.tensor(ids))
    assert output.loss.item() < 0.6 * math.log(2048)
    ours = forward(load_parameters(DEMO_DIRECTORY), ids, NetworkConfig())
    np.testing.assert_allclose(np.asarray(ours), output.logits.numpy(), atol=2e-4)


def test_transformers_generates_a_reply_that_ends(tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_DIRECTORY)
    assert model.dtype == torch.bfloat16
    messages = [{"role": "user", "content": "Good morrow, my lord."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=200)[0, prompt["input_ids"].shape[1] :]
    assert reply[-1].item() == tokenizer.convert_tokens_to_ids(IM_END)
    assert len(reply) > 1
