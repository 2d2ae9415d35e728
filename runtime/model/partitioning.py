"""How the parameters of a model are sharded."""

import jax
from flax import nnx

from meshserve.sharding.mesh import partition_spec


def specs_of(params: nnx.State) -> nnx.State:
    """Returns the partition spec of each parameter."""

    def spec(weight: nnx.Variable) -> nnx.Variable:
        return weight.replace(partition_spec(weight.axes))

    return jax.tree.map(spec, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
