"""What the layers of one step share: where its rows stand, and what they may look at."""

import dataclasses

import jax
import jax.numpy as jnp

from carat_jax.array_types import Array, Int, Lengths, Shaped, Slots
from carat_jax.model.taps import Taps
from carat_jax.numerics.attention import ChunkView, KeyView, RotatedView
from carat_jax.numerics.options import ComputeOptions


@dataclasses.dataclass
class StepContext:
    """What every layer of one step shares.

    `views` collects, by owning layer, what queries may look at, for the layers that borrow it;
    `taps` the arrays that a trace wants.
    """

    starts: Lengths
    num_valid: Lengths
    slots: Slots | None
    options: ComputeOptions
    positions: Int[Array, "B T"]
    rope: dict[bool, tuple[Array, Array]]
    caches: dict
    views: dict[int, KeyView | RotatedView]
    taps: Taps

    def of_last_rows(self) -> "StepContext":
        """The same for each slot's last real row alone, which looks at the caches as written."""
        ends = self.starts + self.num_valid
        before = [owner for owner, view in self.views.items() if isinstance(view, ChunkView)]
        written = {owner: self.caches[owner].view(ends, self.slots) for owner in before}
        return dataclasses.replace(
            self,
            starts=jnp.maximum(ends - 1, 0),
            num_valid=jnp.minimum(self.num_valid, 1),
            positions=self.last_rows(self.positions),
            rope=jax.tree.map(self.last_rows, self.rope),
            views=self.views | written,
        )

    def last_rows(self, rows: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B 1 *rest"]:
        """Each slot's last real row."""
        last = jnp.maximum(self.num_valid - 1, 0).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.take_along_axis(rows, last, axis=1)
