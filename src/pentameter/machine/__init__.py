"""This machine: its devices, cores and memory, the choices that follow from them (device,
precision, compilation), and child processes."""
