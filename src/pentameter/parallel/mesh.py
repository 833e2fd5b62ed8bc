"""The mesh of named dimensions on which everything that several processes share is laid out."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pentameter.plan.layout import MESH_DIMENSIONS, Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The DeviceMesh of MESH_DIMENSIONS; the rank at each place is `layout.coordinates`'.

    Collective: all processes of the layout call it. A dimension of size 1 is there too, so that
    whoever needs one can name it.
    """
    return init_device_mesh(device_type, layout.mesh_shape, mesh_dim_names=MESH_DIMENSIONS)
