"""Kinds of damage to a file of a checkpoint that has an older one beside it."""

from __future__ import annotations

import os

FILES = ["manifest.json", "state.json", "config.toml", "model.safetensors", "optimizer.safetensors"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x04
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def extend(path):
    path.write_bytes(path.read_bytes() + b"\n")


def swap_with_older(path):
    older = min(path.parent.parent.glob("step-????????")) / path.name
    content = path.read_bytes()
    path.write_bytes(older.read_bytes())
    if path.name != "manifest.json":  # leave the older checkpoint whole where it can be
        assert content != path.read_bytes() or path.name == "config.toml"


def link(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def delete(path):
    path.unlink()


DAMAGES = [truncate, empty, flip, zero, extend, swap_with_older, link, pipe, folder, delete]
