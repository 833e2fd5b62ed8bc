"""Pipeline parallelism: PyTorch's schedules over stages with bounded memory."""
