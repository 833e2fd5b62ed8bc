"""The sub-layers of a block, a file each: parameters, operations, and the collectives they cause.

`model/` has a file of the same name for each sub-layer's module.
"""
