#!/usr/bin/env bash
# A node's part of a run, inside the container if there is one:
#
#   node.sh prepare [section.key=value …]   look for mistakes, bring the data here; prints run.dir, and
#                                           `mistake` if there is one, `warned` if Slurm has
#   node.sh train [section.key=value …]     torchrun, which starts the node's processes
#
# LIPNEXT_ROOT, _CONFIG, _NODES, _PROCS_PER_NODE, _RUN_ID, _HEAD_PORT, _MAX_RESTARTS and, for each node
# in turn, _ADDRESSES come from the launcher (slurm_job.sh, ../torchrun.sh); in a Slurm job _RUN_DIR too.
set -euo pipefail

# Slurm's warning before the end may come at any time: what comes too early is remembered.
warned=''
trap 'warned=yes' USR1
cd "$LIPNEXT_ROOT"
source launch/shared/environment.sh

step=$1
shift

# By its exit code alone a mistake is not known: that of another node, which srun ends, may be higher.
# When a node ends, srun may end before it has passed on what was said: it gets a second for that.
report_mistake() {
  echo mistake
  [[ -z ${SLURM_JOB_ID:-} ]] || sleep 1
}

fail() {
  echo "error: $*" >&2
  [[ $step != prepare ]] || report_mistake
  exit 2
}

node=${LIPNEXT_NODE:-${SLURM_NODEID:-0}}
by_hand=${LIPNEXT_NODE:+yes} # by torchrun.sh, perhaps in an allocation
read -ra addresses <<<"$LIPNEXT_ADDRESSES"
train=(lipnext_scale.train --config "$LIPNEXT_CONFIG" "$@")
if [[ -n ${LIPNEXT_STAGE_DIR:-} ]]; then
  train+=("data.stage_dir=$LIPNEXT_STAGE_DIR")
fi

# One process reports a mistake once; torchrun would start all processes over and over with it.
prepare() {
  local status=0
  (
    trap '' USR1 # unlike a handler this one is inherited
    # Of all nodes the first one speaks, others only if they have another thing to say.
    RANK=$node exec "$LIPNEXT_PYTHON" -m "${train[@]}" --check \
      --ranks $((LIPNEXT_NODES * LIPNEXT_PROCS_PER_NODE)) --ranks-per-node "$LIPNEXT_PROCS_PER_NODE"
  ) || status=$?
  ((status != 2)) || report_mistake
  if [[ -n $warned && $status == 0 ]]; then
    echo warned
  fi
  return "$status"
}

train() {
  local is_host=false torchrun
  [[ $node != 0 ]] || is_host=true
  # Addresses are given, for host names need not resolve; and who is the host is not left to them. The
  # others wait for it, which may unpack its container more slowly, longer than torchrun's minute.
  torchrun=("$LIPNEXT_PYTHON" -m torch.distributed.run
    --nnodes "$LIPNEXT_NODES"
    --nproc-per-node "$LIPNEXT_PROCS_PER_NODE"
    --max-restarts "$LIPNEXT_MAX_RESTARTS"
    --rdzv-backend c10d
    --rdzv-id "$LIPNEXT_RUN_ID"
    --rdzv-endpoint "${addresses[0]}:$LIPNEXT_HEAD_PORT"
    --rdzv-conf "is_host=$is_host,read_timeout=600"
    --local-addr "${addresses[$node]}")
  [[ -n ${LIPNEXT_NUMA:-} ]] || ! can_bind || LIPNEXT_NUMA=node
  [[ ${LIPNEXT_NUMA:-none} == none ]] || torchrun+=(--numa-binding "$LIPNEXT_NUMA")
  torchrun+=(-m "${train[@]}")
  if [[ -n ${SLURM_JOB_ID:-} && -z $by_hand ]]; then
    run_as_task "${torchrun[@]}"
  else
    trap '' USR1
    exec "${torchrun[@]}" # Ctrl-C goes to it alone
  fi
}

# With proctrack/cgroup Slurm's signals reach the task alone, none of its children. So this shell stays
# the task and hands them on. Where Slurm reaches all by itself they hear it twice, which does no harm.
run_as_task() {
  local torchrun stopped='' status=0
  (
    trap '' USR1 # it would end torchrun; the ranks inherit this, until they install a handler
    exec "$@"
  ) &
  torchrun=$!
  trap 'stopped=yes; trap "" TERM; kill -TERM "$torchrun" || true' TERM
  trap 'trap "" USR1; warn_ranks "$torchrun" &' USR1 # once for all ranks there will be
  [[ -z $warned ]] || kill -USR1 $$
  while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true # a signal ends it early
  done
  wait "$torchrun" || status=$?
  # Stopped, not failed: a file says so. Where another node has failed srun sends SIGTERM too,
  # and the exit code of that node shall be the job's.
  if [[ -n $stopped && $status != 0 ]]; then
    mkdir -p "$LIPNEXT_RUN_DIR" && touch "$LIPNEXT_RUN_DIR/stopped" && status=0
  fi
  return "$status"
}

# Every rank hears it once, as soon as it listens: also one that torchrun has yet to start.
warn_ranks() {
  local torchrun=$1 children rank warned_ranks=' '
  while kill -0 "$torchrun" 2>/dev/null; do
    read -ra children < <(cat "/proc/$torchrun/task"/*/children 2>/dev/null) || true # has no newline
    for rank in "${children[@]}"; do
      if [[ $warned_ranks != *" $rank "* ]] && catches_usr1 "$rank" && kill -USR1 "$rank" 2>/dev/null; then
        warned_ranks+="$rank "
      fi
    done
    sleep 1
  done
}

catches_usr1() {
  local name signals
  while read -r name signals; do
    [[ $name != SigCgt: ]] || return $(((0x$signals >> 9 & 1) == 0))
  done <"/proc/$1/status"
  return 1
} 2>/dev/null

set_environment
choose_python
"$step" "$@"
