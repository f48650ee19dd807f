#!/usr/bin/env bash
# Runs a recipe on the nodes of a Slurm job, one launch per node; the checkout is on a shared disk.
#
#   sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh RECIPE [key.path=value ...]
#
#SBATCH --job-name=bosch
#SBATCH --ntasks-per-node=1
#SBATCH --output=bosch-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Ten minutes before the time limit: training writes a restart point, and the job is queued again.
#SBATCH --signal=USR1@600
set -euo pipefail
if [ $# -eq 0 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "usage: sbatch --nodes=N --gpus-per-node=G launch/slurm.sh RECIPE [key.path=value ...]" >&2
    exit 2
fi
# Slurm runs a copy of this file from its spool folder; the checkout is where sbatch was called.
root=${BOSCH_ROOT:-$SLURM_SUBMIT_DIR}
if [ ! -f "$root/launch/torchrun.sh" ]; then
    echo "error: $root is no checkout of this project; call sbatch from it or set BOSCH_ROOT" >&2
    exit 2
fi
"$root/launch/setup.sh"

export NNODES=$SLURM_JOB_NUM_NODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# A port of this job's own, so that two jobs on one node do not meet.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export BOSCH_LAUNCHER="$root/launch/torchrun.sh"
# Slurm's signals are for the processes below srun: this script waits for what they make of them.
trap true TERM USR1
status=0
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec "$BOSCH_LAUNCHER" "$@"' bosch "$@" ||
    status=$?
# 75: training has saved its work. 143: another stage was stopped, which goes on from its records.
if [ "$status" -eq 75 ] || [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
