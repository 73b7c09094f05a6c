#!/bin/bash
#SBATCH --job-name=train
#SBATCH --ntasks=4
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch examples/cluster/slurm.sh --folder /shared/run1
# One task per process; with GPUs also: #SBATCH --gpus-per-task=1

srun --label --unbuffered python examples/cluster/train.py "$@"
status=$?

# Again for what is worth it (docs/watchdog.md has the list), ten times at most. Where slurm.conf
# has RequeueExit=75,81,82,137,143 these lines are not needed.
case $status in
75 | 81 | 82 | 137 | 143)
  [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] && scontrol requeue "$SLURM_JOB_ID"
  ;;
esac
exit $status
