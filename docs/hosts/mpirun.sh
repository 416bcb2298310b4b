#!/usr/bin/env bash
# Runs COMMAND as one job of PROCESSES processes, started by Open MPI on this machine or on HOSTS.
# Usage: [HOSTS=first:1,second:1] mpirun.sh PROCESSES COMMAND...
set -euo pipefail

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: [HOSTS=first:1,second:1] mpirun.sh PROCESSES COMMAND..." >&2
    exit 2
fi
if ! command -v mpirun >/dev/null; then
    echo "mpirun.sh: mpirun is not installed (Debian and Ubuntu: apt-get install openmpi-bin)" >&2
    exit 2
fi
processes=$1
shift

# Other hosts get only the variables that are named.
forwarded=()
for name in $(compgen -e); do
    case $name in
        JAX_* | JAXCOLL_* | XLA_* | NCCL_* | PYTHONPATH) forwarded+=(-x "$name") ;;
    esac
done

# XLA starts its own threads, so no process is bound to one core.
exec mpirun -n "$processes" ${HOSTS:+--host "$HOSTS"} --bind-to none "${forwarded[@]}" "$@"
