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
# Slurm runs a copy of this file from its spool folder, so the checkout is the folder where sbatch was
# called.
root=${BOSCH_ROOT:-$SLURM_SUBMIT_DIR}
if [ ! -f "$root/launch/torchrun.sh" ]; then
    echo "error: $root is no checkout of this project; call sbatch from it or set BOSCH_ROOT" >&2
    exit 2
fi
# Checked now, because it is used only when the job ends, which may be days later.
case ${BOSCH_REQUEUES:-0} in
    *[!0-9]*) echo "error: BOSCH_REQUEUES=$BOSCH_REQUEUES: expected a count of times" >&2; exit 2 ;;
esac
"$root/launch/setup.sh"

export NNODES=$SLURM_JOB_NUM_NODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Each job has its own port, so two jobs on one node do not collide.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export BOSCH_LAUNCHER="$root/launch/torchrun.sh"
# srun returns the highest status of all nodes, which includes nodes that it killed after the first one
# ended. So the first node to end writes its status to this file.
export BOSCH_STATUS="$SLURM_SUBMIT_DIR/bosch-$SLURM_JOB_ID.status"
rm -f "$BOSCH_STATUS"
# Slurm's signals are handled by the processes below srun; the scripts only wait for them.
trap true TERM USR1
status=0
srun --export=ALL --kill-on-bad-exit=1 bash -c 'trap true TERM USR1
    NODE_RANK=$SLURM_NODEID "$BOSCH_LAUNCHER" "$@"
    status=$?
    set -o noclobber
    [ $status -eq 0 ] || { echo $status >"$BOSCH_STATUS"; } 2>/dev/null
    exit $status' bosch "$@" || status=$?
[ ! -s "$BOSCH_STATUS" ] || status=$(cat "$BOSCH_STATUS")
rm -f "$BOSCH_STATUS"
# 75: the run was stopped at its time limit and has saved its work.
[ "$status" -eq 75 ] || exit "$status"
most=${BOSCH_REQUEUES:-100}
if [ "${SLURM_RESTART_COUNT:-0}" -lt "$most" ]; then
    scontrol requeue "$SLURM_JOB_ID"
else
    echo "error: this job ended with status $status and was queued again ${SLURM_RESTART_COUNT:-0} times;" \
        "see its log for why, and queue it again to resume (BOSCH_REQUEUES=N allows N times)" >&2
fi
exit "$status"
