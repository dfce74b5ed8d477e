"""The mesh: which rank stands where."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec import Layout

DIMENSIONS = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """A named device mesh with every dimension of the layout, also those of size 1."""

    devices: DeviceMesh

    @property
    def data_rank(self) -> int:
        """Which share of every batch this rank reads, 0 … data_ranks - 1."""
        return self.coordinate("dp_replicate") * self.devices["dp_shard"].size() + self.coordinate("dp_shard")

    def coordinate(self, dimension: str) -> int:
        return self.devices.get_local_rank(dimension)

    def describe(self) -> str:
        """This rank's place, for messages: 'dp_replicate 0, dp_shard 1'."""
        return ", ".join(f"{name} {self.coordinate(name)}" for name in DIMENSIONS)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The mesh of the default process group; its world size must equal layout.world."""
    sizes = tuple(getattr(layout, name) for name in DIMENSIONS)
    return Mesh(init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS))
