trap : TERM HUP  # Slurm tells every process: this one waits for the run

run() {  # run FIRST_NODE NODES COMMAND: one task per node
  srun --relative="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${@:3}"
}

run 0 "$SLURM_JOB_NUM_NODES" bash -c 'test -d "$0" || { echo "$SLURMD_NODENAME does not see $0: choose a'\
' --logging.directory on a file system that all nodes share" >&2; exit 2; }' "$directory" || exit 2

export WORLD_SIZE="$SLURM_JOB_NUM_NODES" LOCAL_WORLD_SIZE=1 PYTHONUNBUFFERED=1 NCCL_DEBUG=WARN
export TITAN_RL_NODES="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')"
export MASTER_PORT="$("$python" -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')"
rank='export RANK=$((SLURM_PROCID + $0)) MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'

if [ "$WORLD_SIZE" -gt 1 ]; then
  run 1 $((WORLD_SIZE - 1)) bash -c "$rank" 1 "${train[@]}" &
fi
run 0 1 bash -c "$rank" 0 "${train[@]}"
code=$?
if [ "$code" = 129 ] && [ "$SECONDS" -lt $save_seconds ]; then
  echo "the time limit leaves the run less than its --save-seconds $save_seconds: ask for more --time" >&2
elif [ "$code" = 129 ]; then  # the time is nearly over, and the run is saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
