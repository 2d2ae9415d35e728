"""Reads config.json, and what ModelOpt writes beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model_config import read_json, read_json_if_present

QUANTIZATION_FILE = "hf_quant_config.json"
_FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads a config.json. One without `quantization_config` has that of hf_quant_config.json, if there is one.

    ModelOpt writes both; its first releases wrote the latter only.

    Raises:
      FileNotFoundError: The file does not exist.
      UnsupportedModelError: A file cannot be read, or does not contain a JSON object.
    """
    raw = read_json(path)
    if raw.get("quantization_config") is None and (found := read_json_if_present(path.parent / QUANTIZATION_FILE)):
        raw["quantization_config"] = quantization_config(found)
    return raw


def quantization_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `quantization_config` that the contents of an hf_quant_config.json mean, as ModelOpt writes it."""
    details = raw.get("quantization")
    options = dict(details) if isinstance(details, Mapping) else {}
    cache = options.pop("kv_cache_quant_algo", None)
    options["ignore"] = options.pop("exclude_modules", None)
    options["kv_cache_scheme"] = _FP8_CACHE if cache == "FP8" else cache
    return {key: value for key, value in options.items() if value is not None} | {"quant_method": "modelopt"}
