#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00

# One agent per node; each starts RANKS ranks. The agents meet at the first node of the job.
set -euo pipefail
RANKS=${RANKS:-2}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A secret that only this job has: without it, whoever reaches the port below could join.
ALLHANDS_TOKEN=$(head -c 32 /dev/urandom | base64)
export ALLHANDS_TOKEN

# Jobs that share a node must not share a port, so it depends on the job's number.
port=$((20000 + SLURM_JOB_ID % 10000))

# shellcheck disable=SC2016  # SLURM_NODEID is different on each node, so the node's own shell reads it.
srun bash -c 'exec allhands run --nproc-per-node "$1" --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
  --coordinator "$2" train.py' agent "$RANKS" "$first:$port"
