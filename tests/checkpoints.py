"""Creates random Qwen3 checkpoints in Hugging Face's format, and computes reference outputs with transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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


def add_head(directory: Path, *, is_changed: bool) -> None:
    """Stores an output head beside the embedding of a tied model: equal to it, or with its second half negated."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    if is_changed:
        head[len(head) // 2 :] *= -1
    save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})


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
