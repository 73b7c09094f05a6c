#!/bin/bash
# examples/cluster/tpu_pod.sh NAME ZONE --folder /shared/run1
# Starts train.py on every host of a TPU pod, where it is installed, and again when it ends for a
# reason that is worth it. NOT RUN by this project's tests.
name=$1 zone=$2
shift 2

for _ in {0..10}; do
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
    --command="python3 train.py $*"
  status=$?
  # One host's own status may come, or ssh's: any but that of an error of the program.
  case $status in
  0 | 83) break ;;
  *) echo "ended with $status, again" >&2 ;;
  esac
done
exit $status
