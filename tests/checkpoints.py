"""Creates random Qwen3 checkpoints in Hugging Face's format, and computes reference outputs with transformers."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file as save_numpy_file
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from meshserve.runtime.weights.locate import DEMO_DIRECTORY

DEMO = DEMO_DIRECTORY

# Tiny but not trivial: 8 query heads allow TP sizes 1, 2, 4 and 8.
TINY = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "eos_token_id": None,
}
# With experts, beside `TINY`.
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def save_checkpoint(directory: Path, *, seed: int = 0, shard_size: str = "1GB", **overrides: Any) -> Path:
    """Writes a random model and a byte-level tokenizer into `directory`. With `num_experts`, it has experts."""
    torch.manual_seed(seed)
    config_class, model_class = Qwen3Config, Qwen3ForCausalLM
    if "num_experts" in overrides:
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
    model = model_class(config_class(**{**TINY, **overrides}, initializer_range=0.25)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # initialized to ones, which would hide an error
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size=shard_size)
    save_byte_tokenizer(directory)
    return directory


def save_byte_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with the 256 bytes as its only tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def edit_config(directory: Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes a key."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def replace_tensors(directory: Path, tensors: Mapping[str, Any]) -> None:
    """Replaces the weights of a model by these arrays of numpy."""
    save_numpy_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def add_head(directory: Path, *, is_changed: bool) -> None:
    """Stores an output head beside the embedding of a tied model: equal to it, or with its second half negated."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    if is_changed:
        head[len(head) // 2 :] *= -1
    save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})


def truncated_demo(directory: Path, num_layers: int) -> Path:
    """Copies the demo model without its last layers into `directory`, which may not exist yet."""
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text())
    dropped = tuple(f"model.layers.{index}." for index in range(num_layers, config["num_hidden_layers"]))
    edit_config(directory, num_hidden_layers=num_layers, layer_types=config["layer_types"][:num_layers])
    tensors = load_file(DEMO / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def greedy(directory: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Returns what transformers generates in float32, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            mask = torch.ones_like(ids)
            output = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=max_tokens, max_new_tokens=max_tokens
            )
            outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def hidden_states(directory: Path, prompt: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the output of every layer [T, D] before the final norm, and the logits [T, V], in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _module, _args, out: outputs.append(
                (out[0] if isinstance(out, tuple) else out).reshape(len(prompt), -1)
            )
        )
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt)])).logits[0]
    return outputs, logits


def log_likelihood(directory: Path, context: Sequence[int], tokens: Sequence[int]) -> float:
    """Returns the log-probability that transformers gives to `tokens` after `context`, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    return float(logprobs.gather(1, torch.tensor([list(tokens)]).T).sum())


END_OF_TEXT = "<|endoftext|>"


def save_embedding_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random embedding model into `directory`, with the files and tensor names of Qwen3-Embedding."""
    save_checkpoint(directory, seed=seed, **overrides)
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    save_tokenizer_with_ends(directory)
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    listed = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, folder) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    width = {**TINY, **overrides}["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def save_reranker_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model with a tokenizer that has the tokens "yes" and "no"."""
    save_checkpoint(directory, seed=seed, **overrides)
    save_tokenizer_with_ends(directory)
    return directory


def save_tokenizer_with_ends(directory: Path) -> None:
    """Writes the byte tokenizer with the special token that it appends to each text, and with "yes" and "no"."""
    save_byte_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.add_tokens(["yes", "no"])
    ends = [(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END_OF_TEXT}", special_tokens=ends)
    tokenizer.save(str(path))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def pooled_last_tokens(
    directory: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns transformers' last hidden state of each prompt's last token, [B, D] float32, from one padded batch."""
    model = AutoModel.from_pretrained(directory, dtype=dtype).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1].float()


def yes_no_scores(directory: Path, prompts: Sequence[Sequence[int]], no: int, yes: int) -> list[float]:
    """Returns the probabilities of "yes" against "no" after each prompt, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scores = []
    with torch.no_grad():
        for prompt in prompts:
            logits = model(torch.tensor([list(prompt)])).logits[0, -1]
            scores.append(float(torch.softmax(logits[[no, yes]], dim=0)[1]))
    return scores
