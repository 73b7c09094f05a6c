#!/bin/bash
# examples/cluster/mpirun.sh 4 --folder /shared/run1
# Open MPI restarts nothing, so this does: with the same number of processes, ten times at most.
processes=$1
shift

for _ in {0..10}; do
  mpirun -n "$processes" --tag-output python examples/cluster/train.py "$@"
  status=$?
  case $status in
  75 | 81 | 82 | 137 | 143) echo "mpirun ended with $status, again" >&2 ;;
  *) break ;;
  esac
done
exit $status
