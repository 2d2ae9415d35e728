"""Writes a trained network as an ordinary Hugging Face directory that `meshserve serve` and transformers can load.

In: parameters, sizes and the tokenizer. Out: config.json, generation_config.json, model.safetensors (bfloat16),
tokenizer.json, tokenizer_config.json and chat_template.jinja.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from .documents import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS
from .network import RMS_NORM_EPSILON, NetworkConfig, Parameters


def export_model(folder: Path, parameters: Parameters, config: NetworkConfig, tokenizer: Tokenizer) -> None:
    """Writes the model directory; parameters are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: jnp.asarray(value, jnp.bfloat16) for name, value in parameters.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    end_of_text, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    model_config(config, end_of_text, im_end).save_pretrained(folder)
    GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, im_end],
        pad_token_id=end_of_text,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    ).save_pretrained(folder)
    _save_tokenizer(folder, tokenizer, config.max_context_tokens)


def model_config(config: NetworkConfig, end_of_text: int, im_end: int) -> Qwen3Config:
    """Returns the sizes as transformers' configuration of `Qwen3ForCausalLM`."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=config.vocabulary_tokens,
        hidden_size=config.embed_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_query_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act="silu",
        max_position_embeddings=config.max_context_tokens,
        rms_norm_eps=RMS_NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attention_bias=False,
        use_sliding_window=False,
        max_window_layers=config.num_layers,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
    )


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, max_context_tokens: int) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START, IM_END],
        model_max_length=max_context_tokens,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # transformers 5 would write its own class name here; this one also loads in transformers 4.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def load_parameters(folder: Path) -> dict[str, np.ndarray]:
    """Returns the parameters of a model directory as float32 arrays by their Hugging Face names."""
    return {name: np.asarray(value, np.float32) for name, value in load_file(folder / "model.safetensors").items()}
