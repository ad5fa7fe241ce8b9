#!/bin/bash
# SLURM's Prolog on a node that lends its GPUs by attnd@GPU.service: the daemons of a job's GPUs go before the job starts.
# Stopping one drains it and gives its GPU memory back; the job waits for it (PrologFlags=Alloc,Contain in slurm.conf).
set -eu
[ -n "${SLURM_JOB_GPUS:-}" ] || exit 0
units=()
for gpu in ${SLURM_JOB_GPUS//,/ }; do units+=("attnd@$gpu.service"); done
systemctl stop "${units[@]}"
