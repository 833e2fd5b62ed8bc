#!/bin/bash
# GPT-2 124M on two machines of eight GPUs. Run the same line on both, with the first one's name:
#   bash examples/torchrun.sh HOST SHARDS
# For other numbers change --nnodes alone, if processes divide 32 (more: see slurm.sbatch).
# All must see the same runs folder and SHARDS, tokens that `pentameter prepare` wrote (slurm.sbatch
# says from what). Nothing is started again: torchrun would do so after a mistake, too.
set -eu

torchrun --nnodes 2 --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$1:29400" --rdzv-id gpt2-124m \
  --module pentameter train gpt2-124m --data.path "$2" --run-dir runs/gpt2-124m
