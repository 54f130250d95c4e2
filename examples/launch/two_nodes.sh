#!/usr/bin/env bash
# Trainers on one node and a vLLM server on another, started by hand. On the server's node:
#
#     MODEL=Qwen/Qwen2.5-7B-Instruct bash examples/launch/two_nodes.sh server
#
# and on the trainers' node, with the name of the server's node:
#
#     SERVER=node2 bash examples/launch/two_nodes.sh trainer examples/launch/runs/server.yaml
#
# The trainers send their weights to the server over NCCL: its ports 8000 and 51216 (for the NCCL group) must be open.
set -euo pipefail

usage='usage: MODEL=NAME two_nodes.sh server   or   SERVER=HOST two_nodes.sh trainer RUN.yaml [--set PLACE=VALUE ...]'
role=${1:?$usage}
shift
case $role in
server)
  exec trl vllm-serve --model "${MODEL:?$usage}" --host 0.0.0.0 --port "${PORT:-8000}" \
    --tensor-parallel-size "${TENSOR_PARALLEL:-1}" --data-parallel-size "${DATA_PARALLEL:-1}" \
    --max-model-len "${MAX_MODEL_LEN:-8192}" "$@"
  ;;
trainer)
  run=${1:?$usage}
  shift
  here=$(dirname "$(readlink -f "$0")")
  exec accelerate launch --config_file "${CONFIG:-$here/accelerate/ddp.yaml}" --num_processes "${GPUS:-8}" \
    "$here/train.py" "$run" --set "training.vllm_server_base_url=http://${SERVER:?$usage}:${PORT:-8000}" "$@"
  ;;
*)
  echo "$usage" >&2
  exit 2
  ;;
esac
