#!/bin/bash
# GPT-2 124M on two machines of eight GPUs. Run the same line on both, with the first one's name:
#   bash examples/torchrun.sh HOST
# Both must see the same runs folder.
set -eu

torchrun --nnodes 2 --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$1:29400" --rdzv-id gpt2-124m \
  --module pentameter train gpt2-124m --run-dir runs/gpt2-124m --parallel.data 16
