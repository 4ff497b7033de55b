#!/usr/bin/env bash
# Serve the embedded target with its head: examples/serve.sh [SHAPE] [NODES]
#
#   examples/serve.sh               a chain of 3
#   examples/serve.sh tree 16       draft trees of 16 nodes
#
# then, in another shell:  python examples/client.py
set -euo pipefail
shape=${1:-auto}
nodes=${2:-5}
paths=$(vllm-eagle3 target smollm2)
target=$(sed -n 's/^target: *//p' <<<"$paths")
head=$(sed -n 's/^head: *//p' <<<"$paths")
LD_PRELOAD=$(python -m vllm_eagle3.preload) exec vllm serve "$target" \
  --served-model-name smollm2 --host 127.0.0.1 --max-model-len 2048 \
  --speculative-config \
  "{\"method\":\"eagle3\",\"model\":\"$head\",\"num_speculative_tokens\":$nodes}" \
  --additional-config "{\"vllm_eagle3\":{\"shape\":\"$shape\"}}"
