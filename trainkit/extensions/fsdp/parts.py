"""Parts: what a rank holds of a weight that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.engine.pieces import Piece
from trainkit.engine.ranks import Ranks


def part_of(tensor: DTensor, ranks: Ranks, is_first_replica: bool) -> Piece:
    """Return this rank's part.

    Args:
        is_first_replica: whether no other replica of all weights comes before this rank's.
    """
    mesh = tensor.device_mesh
    placements = tensor.placements
    shape, at = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place: Sequence[int] = mesh.get_coordinate() or []
    is_first = is_first_replica and all(
        i == 0 for i, placement in zip(place, placements, strict=True) if placement.is_replicate()
    )
    is_first = is_first and (
        "tensor" in (mesh.mesh_dim_names or ()) or ranks.rank % ranks.tensor_size == 0
    )
    return Piece(tensor.to_local(), tuple(at), tuple(tensor.shape), is_first and 0 not in shape)
