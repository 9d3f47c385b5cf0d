"""Dimension letters and array aliases: the legend every signature in the project is read with.

    B  slots of the cache bank (b: those in a step)   N  query heads
    T  new positions in one step                      K  key-value heads
    S  length of a linear (global) cache              G  query heads a KV head serves, N / K
    C  capacity of a ring (local) cache               H  head dimension of the layer
    W  sliding window, counting the query itself      D  embedding width (`hidden_size`)
    V  vocabulary                                     L  layers
    M  draft length                                   F  width of the MLP, or of one expert
    E  experts of a mixture (k: those of one token)   P  width of a per-layer input
    R  rotated numbers of a key in layout `v_rot`     half  H / 2

Positions are absolute everywhere and start at 0. Annotations are checked at run time in the
tests, which import the package through jaxtyping's hook, and cost nothing elsewhere.
"""

from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

Tokens = Int[Array, "B T"]
Positions = Int[Array, "B T"]
Lengths = Int[Array, "B"]
Slots = Int[Array, "b"]
Hidden = Float[Array, "B T D"]
# What the residual takes in, or parts whose sum it is.
Branch = Float[Array, "*parts B T D"]
ExpertWeights = Float[Array, "B T k"]
ExpertIds = Int[Array, "B T k"]
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B T K H"]
Values = Float[Array, "B T K H"]
CacheRows = Float[Array, "B K S H"]

__all__ = [
    "Array",
    "Bool",
    "CacheRows",
    "ExpertIds",
    "ExpertWeights",
    "Float",
    "Hidden",
    "Int",
    "Keys",
    "Lengths",
    "Positions",
    "Queries",
    "Shaped",
    "Slots",
    "Tokens",
    "UInt",
    "Values",
]
