"""Turns plays into training text: raw scenes and chat dialogues, a tokenizer, and arrays of ids.

In: plays (corpus.py). Out: a folder with `tokenizer.json`, `ids.npz` and `summary.json` for the training program.

`ids.npz` holds one flat uint16 array per split and form (`train_raw`, `train_chat`, `heldout_raw`, `heldout_chat`).
Every document ends with `<|endoftext|>`.
"""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Part, Play, Scene, read_plays

HELD_OUT_PLAYS = ("macbeth", "twelfth_night")  # a tragedy and a comedy, 4.5 % of the text
VOCABULARY_TOKENS = 2048
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_SYSTEM_SHARE = 0.3  # share of dialogues that open with a system message, the scene's heading
_MAX_EXCHANGES = 6  # a dialogue is 1 to 6 pairs of user and assistant turns


def raw_document(scene: Scene) -> str:
    """Formats the scene as play text: heading, directions in brackets, speeches under `NAME:`, with blank lines."""
    return "\n\n".join([scene.heading, *(_raw_part(part) for part in scene.parts)]) + "\n"


def _raw_part(part: Part) -> str:
    head = [] if part.speaker is None else [f"{part.speaker}:"]
    return "\n".join(head + part.lines)


def turns(scene: Scene) -> list[str]:
    """Returns the scene's speeches without directions, joining consecutive speeches of the same speaker."""
    spoken: list[tuple[str, str]] = []
    for part in scene.parts:
        text = spoken_text(part)
        if text and part.speaker and spoken and spoken[-1][0] == part.speaker:
            spoken[-1] = (part.speaker, f"{spoken[-1][1]}\n{text}")
        elif text and part.speaker:
            spoken.append((part.speaker, text))
    return [text for _, text in spoken]


def spoken_text(part: Part) -> str:
    """Returns the lines of a speech without the directions in brackets."""
    lines = (" ".join(re.sub(r"\[[^\]]*\]?", " ", line).split()) for line in part.lines)
    return "\n".join(line for line in lines if line)


def dialogues(scene: Scene, rng: random.Random) -> Iterator[str]:
    """Yields the scene twice as chats of 1 to 6 exchanges, so that each speech is a turn of both user and assistant."""
    template = jinja2.Template(CHAT_TEMPLATE)
    spoken = turns(scene)
    for start in (0, 1):
        position = start
        while position + 1 < len(spoken):
            end = position + 2 * rng.randint(1, _MAX_EXCHANGES)
            pairs = spoken[position:end]
            pairs = pairs[: len(pairs) // 2 * 2]
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(pairs)]
            if rng.random() < _SYSTEM_SHARE:
                messages.insert(0, {"role": "system", "content": scene.heading})
            yield template.render(messages=messages, add_generation_prompt=False)
            position = end


def train_tokenizer(texts: Iterable[str], vocabulary_tokens: int = VOCABULARY_TOKENS) -> Tokenizer:
    """Trains a byte-level BPE; any text round-trips, and the special tokens have ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split_plays(plays: list[Play]) -> dict[str, list[Scene]]:
    """Returns the scenes by split; whole plays are held out, so no scene of a held-out play is used for training."""
    split: dict[str, list[Scene]] = {"train": [], "heldout": []}
    for play in plays:
        split["heldout" if play.name in HELD_OUT_PLAYS else "train"].extend(play.scenes)
    return split


def prepare(archive: Path, folder: Path) -> dict[str, dict[str, int]]:
    """Writes tokenizer, ids and summary to `folder` and returns the summary (documents, tokens, bytes by array).

    `bytes` counts the text without special tokens, so that a loss per byte is comparable across tokenizers.
    """
    texts: dict[str, list[str]] = {}
    for split, scenes in split_plays(read_plays(archive)).items():
        rng = random.Random(0)
        texts[f"{split}_raw"] = [raw_document(scene) for scene in scenes]
        texts[f"{split}_chat"] = [text for scene in scenes for text in dialogues(scene, rng)]
    tokenizer = train_tokenizer(texts["train_raw"])
    ids = {name: _encode(tokenizer, documents) for name, documents in texts.items()}
    summary = {
        name: {
            "documents": len(documents),
            "tokens": int(ids[name].size),
            "bytes": sum(len(_without_special_tokens(text).encode()) for text in documents),
        }
        for name, documents in texts.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.savez_compressed(folder / "ids.npz", allow_pickle=False, **ids)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    encodings = tokenizer.encode_batch([text + END_OF_TEXT for text in documents])
    return np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in encodings])


def _without_special_tokens(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text
