#!/bin/bash
# SLURM's Epilog on a node that lends its GPUs by attnd@GPU.service: the daemons of the job's GPUs start again.
set -eu
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
units=()
for gpu in ${SLURM_JOB_GPUS//,/ }; do units+=("attnd@$gpu.service"); done
systemctl start --no-block "${units[@]}"
