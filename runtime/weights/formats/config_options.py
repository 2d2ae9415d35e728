"""Options of `quantization_config`: each is checked as it is read.

An option that nothing has read may be known to change nothing. If it is known to change the weights' values, it is
refused; others are noted (`ModelConfig.notes`).
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from ...api.errors import UnsupportedModelError
from ...model_files.module_expressions import check_expression
from ...model_files.number_bounds import shown

INT4_GROUPS = (32, 64, 128)

# Options that say how a checkpoint was made or how another program computes with it, not how it is read.
_IGNORED = frozenset(
    # transformers
    "quant_method dequantize tokenizer dataset batch_size model_seqlen block_name_to_quantize max_input_length "
    "module_name_preceding_first_block pad_token_id cache_block_outputs modules_in_block_to_quantize use_cuda_fp16 "
    "use_exllama disable_exllama exllama_config "
    # AutoAWQ
    "backend do_fuse fuse_max_seq_len modules_to_fuse "
    # AutoGPTQ and GPTQModel
    "damp_percent damp_auto_increment true_sequential static_groups meta model_name_or_path model_file_base_name "
    "pack_dtype act_group_aware hyb_act mse is_marlin_format method offload_to_disk offload_to_disk_path pack_impl "
    "gptaq foem fallback failsafe device v2 v2_alpha v2_memory_device adapter compute_device_filter "
    "calibration_data_device auto_forward_data_parallel vram_strategy dense_vram_strategy moe gc_mode hessian process "
    "wait_for_submodule_finalizers "
    # AutoRound
    "iters nsamples seqlen autoround_version low_gpu_mem_usage enable_quanted_input enable_minmax_tuning lr minmax_lr "
    "gradient_accumulate_steps amp not_use_best_mse enable_norm_bias_tuning dynamic_max_gap enable_alg_ext provider "
    "to_quant_block_names quant_block_list supported_types scale_dtype "
    # compressed-tensors
    "global_compression_ratio quantization_status run_compressed use_optimized_inference observer observer_kwargs "
    "moe_sparsity_config".split()
)
# Options that mean that values are other than the stored numbers say.
_CHANGING = frozenset("rotation rotation_config hadamard hadamard_group_size hadamard_size smooth_scale".split())


class Options:
    """The options of one JSON object.

    Args:
      where: Names the object in messages.
      values: The object.
      unknown: Receives the names of options that nothing has read.
    """

    def __init__(self, where: str, values: Any, unknown: list[str]):
        if not isinstance(values, Mapping):
            raise UnsupportedModelError(f"config.json: {where} is {shown(values)}; it must be an object.")
        self._where, self._values, self._unknown, self._read = where, values, unknown, set(_IGNORED)

    def any(self, key: str, default: Any = None) -> Any:
        """Returns a value that the caller checks."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def leave(self, key: str) -> None:
        """Has `finish` note an option, although it has been read."""
        self._read.discard(key)

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Returns a value that must be among those allowed. A missing one has the default, if that is allowed."""
        value = self.any(key, default)
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            self.refuse(key, _listed(allowed))
        return value

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raises UnsupportedModelError for the value of an option."""
        raise UnsupportedModelError(f"config.json: {self._where}.{key} is {shown(self.any(key))}; allowed: {allowed}.")

    def object(self, key: str) -> "Options":
        """Returns the options of an object within this one."""
        return Options(f"{self._where}.{key}", self.any(key), self._unknown)

    def only_object(self, key: str) -> "Options":
        """Returns the options of the one object, of any name, within the object `key`."""
        objects = self.any(key)
        if not isinstance(objects, Mapping) or len(objects) != 1:
            self.refuse(key, "an object with one entry")
        return self.object(key).object(next(iter(objects)))

    def modules(self, key: str) -> tuple[str, ...]:
        """Returns a list of module names, empty if there is none. "re:" begins a regular expression."""
        names = self.any(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UnsupportedModelError(
                f"config.json: {self._where}.{key} is {shown(names)}; it must be a list of module names."
            )
        for name in names:
            if name.startswith("re:"):
                self.check_expression(key, name.removeprefix("re:"))
        return tuple(names)

    def check_expression(self, key: str, expression: str) -> None:
        """Raises UnsupportedModelError if an option's regular expression is none, or has no bound of time."""
        try:
            check_expression(expression)
        except ValueError as error:
            raise UnsupportedModelError(
                f"config.json: {self._where}.{key} has {shown(expression)}, which is no regular expression that "
                f"meshserve can match: {error}. List the modules by name instead."
            ) from None

    def finish(self) -> None:
        """Notes options that nothing has read, unless their values ask for nothing.

        Raises:
          UnsupportedModelError: One of them is known to change the weights' values.
        """
        rest = sorted(key for key, value in self._values.items() if key not in self._read and value)
        for key in rest:
            if key in _CHANGING:
                self.refuse(key, "nothing, because the weights would have other values")
        self._unknown += [f"{self._where}.{key}" for key in rest]


def _listed(allowed: tuple[Any, ...]) -> str:
    return ", ".join("nothing" if choice is None else repr(choice) for choice in allowed)
