"""Weight map of Qwen3 mixture of experts: as the dense model's, with the tensors of each expert apart."""

import dataclasses

from meshserve.sharding.layout import GATE, UP

from .qwen3_weights import WEIGHT_MAP as DENSE
from .weight_map import PerExpert, Whole

WEIGHT_MAP = dataclasses.replace(
    DENSE,
    layers={
        **DENSE.layers,
        "experts.router": Whole("mlp.gate.weight"),
        "experts.gate_up": PerExpert(
            {GATE: "mlp.experts.{}.gate_proj.weight", UP: "mlp.experts.{}.up_proj.weight"}, mlp_axis=0
        ),
        "experts.down": PerExpert({None: "mlp.experts.{}.down_proj.weight"}, mlp_axis=1),
    },
    projections=DENSE.projections | {"experts.gate_up", "experts.down"},
    fused={
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
    },
)
