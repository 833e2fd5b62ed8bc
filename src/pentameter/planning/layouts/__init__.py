"""Layouts: a mesh's dimensions, what each shards, what a layout refuses."""
