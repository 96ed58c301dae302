#!/bin/bash
# Start-up script of the instances of a managed instance group: one agent of `allhands run` on each.
#
# Keys of the instance's metadata that it reads:
#   allhands-hosts   the instances in order, the same on all: train-0,train-1
#   allhands-token   the job's secret, the same on all
#   allhands-ranks   ranks on each instance (default: auto, one per GPU or per core)
set -euo pipefail

server=${GCE_METADATA_HOST:-metadata.google.internal}

# The metadata server may still be starting at boot, so a refused connection is retried; a missing key (404) is not.
metadata() {
  curl --silent --show-error --fail --retry 10 --retry-connrefused --max-time 30 \
    --header 'Metadata-Flavor: Google' "http://$server/computeMetadata/v1/instance/$1"
}

# train-0.us-central1-a.c.my-project.internal
own=$(metadata hostname)
IFS=', ' read -ra hosts <<<"$(metadata attributes/allhands-hosts)"
ranks=$(metadata attributes/allhands-ranks 2>/dev/null || echo auto)
ALLHANDS_TOKEN=$(metadata attributes/allhands-token)
export ALLHANDS_TOKEN

node=-1
for number in "${!hosts[@]}"; do
  if [[ ${hosts[number]} == "${own%%.*}" ]]; then node=$number; fi
done
if ((node < 0)); then
  echo "this instance, ${own%%.*}, is not in its metadata's allhands-hosts=${hosts[*]}" >&2
  exit 1
fi

cd "${TRAIN_DIR:-/opt/train}"
export PATH="$PWD/venv/bin:$PATH"
exec allhands run --nproc-per-node "$ranks" --nnodes "${#hosts[@]}" --node-rank "$node" \
  --coordinator "${hosts[0]}.${own#*.}:29500" train.py
