# shellcheck shell=bash
# The body of every batch script of launch/: sourced by it, with its arguments, on the first node.
# LIPNEXT_ROOT (the repository) and LIPNEXT_CONFIG are set. What else can be: docs/cluster.md.
#
# One srun task a node runs node.sh, first `prepare`, then `train`. Then
#   finished                → exit 0
#   stopped by USR1         → scontrol requeue; the same script runs again and the run goes on,
#                             whatever its processes said when they left
#   stopped by SIGTERM      → the same if the job was preempted, else exit 143
#   a mistake of the user   → exit 2, never requeued
#   another failure         → its exit code; requeued if LIPNEXT_FAILURE_REQUEUES allows another try

fail() {
  echo "error: $*" >&2
  exit 2
}
# shellcheck source=launch/shared/environment.sh
source "$LIPNEXT_ROOT/launch/shared/environment.sh"

# --- where ---------------------------------------------------------------------------------------

# Slurm's own addresses of the nodes: their names need not resolve, and there is no scontrol in a
# container. LIPNEXT_HEAD_ADDRESS goes over the first one.
node_addresses() {
  local name address=${LIPNEXT_HEAD_ADDRESS:-}
  while read -r name; do
    echo "${address:-$(scontrol show node "$name" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}"
    address=''
  done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}

describe_job() {
  # The last job of an array has the array's own number, which would mean them all.
  job=$SLURM_JOB_ID
  [[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  LIPNEXT_NODES=$SLURM_JOB_NUM_NODES
  unset LIPNEXT_NODE # that of torchrun.sh; here Slurm numbers
  # torchrun starts a process for each GPU of a node.
  : "${LIPNEXT_PROCS_PER_NODE:=${SLURM_GPUS_ON_NODE:-1}}"
  LIPNEXT_ADDRESSES=$(node_addresses | paste -sd ' ')
  # On one node a free port; on several all must know it, and jobs that share a node must not meet.
  local port=0
  ((LIPNEXT_NODES == 1)) || port=$((20000 + SLURM_JOB_ID % 10000))
  : "${LIPNEXT_HEAD_PORT:=$port}"
  # A requeued job must not meet what is left of its former self.
  LIPNEXT_RUN_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
  # A crash costs a minute in the allocation instead of another wait in the queue; twice is no chance.
  : "${LIPNEXT_MAX_RESTARTS:=1}" "${LIPNEXT_FAILURE_REQUEUES:=0}"
  require_numbers LIPNEXT_PROCS_PER_NODE LIPNEXT_MAX_RESTARTS LIPNEXT_FAILURE_REQUEUES
  export LIPNEXT_ROOT LIPNEXT_CONFIG LIPNEXT_NODES LIPNEXT_PROCS_PER_NODE LIPNEXT_ADDRESSES
  export LIPNEXT_HEAD_PORT LIPNEXT_RUN_ID LIPNEXT_MAX_RESTARTS
}

# --- how -----------------------------------------------------------------------------------------

# Sets `on_nodes`, the command that runs something once on every node, in the container if there is one.
choose_container() {
  on_nodes=(srun --nodes="$LIPNEXT_NODES" --ntasks="$LIPNEXT_NODES" --ntasks-per-node=1)
  # After `sbatch --export=NONE` srun would pass on as little as sbatch did, and nothing of the above.
  on_nodes+=(--export=ALL)
  # Without its peers a node waits in vain.
  on_nodes+=(--kill-on-bad-exit=1)
  # srun does not take this over from sbatch.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || on_nodes+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  [[ -n ${LIPNEXT_CONTAINER_IMAGE:-}${LIPNEXT_APPTAINER_IMAGE:-} ]] || return 0
  make_stage_dir
  # Both take SOURCE:TARGET[,…]. The repository is where it is outside, and so are runs and data in it.
  local mounts=$LIPNEXT_ROOT:$LIPNEXT_ROOT
  mounts+=${LIPNEXT_STAGE_DIR:+,$LIPNEXT_STAGE_DIR:$LIPNEXT_STAGE_DIR}
  mounts+=${LIPNEXT_SITE:+,$LIPNEXT_SITE:$LIPNEXT_SITE}
  mounts+=${LIPNEXT_CONTAINER_MOUNTS:+,$LIPNEXT_CONTAINER_MOUNTS}
  if [[ -n ${LIPNEXT_CONTAINER_IMAGE:-} ]]; then # Pyxis and Enroot
    on_nodes+=(--container-image="$LIPNEXT_CONTAINER_IMAGE" --container-mounts="$mounts")
    on_nodes+=(--container-workdir="$LIPNEXT_ROOT")
  else
    on_nodes+=(apptainer exec --nv --bind "$mounts" --pwd "$LIPNEXT_ROOT" "$LIPNEXT_APPTAINER_IMAGE")
  fi
  export LIPNEXT_IN_CONTAINER=yes
}

# Only what is there can be mounted. Without a container the run makes it itself.
make_stage_dir() {
  local status=0 what="LIPNEXT_STAGE_DIR = ${LIPNEXT_STAGE_DIR:-}"
  [[ -n ${LIPNEXT_STAGE_DIR:-} ]] || return 0
  [[ $LIPNEXT_STAGE_DIR == /* ]] || fail "$what: must begin with / to be mounted into a container"
  "${on_nodes[@]}" --kill-on-bad-exit=0 mkdir -p "$LIPNEXT_STAGE_DIR" || status=$?
  ((status != 1)) || fail "$what: cannot be made, see above"
  ((status == 0)) || exit "$status"
}

# Sets `overrides`: the user's, in which %a is the array's index. Without them, index → seed and
# run directory; jobs of an array must not write into one.
choose_overrides() {
  overrides=("$@")
  local index=${SLURM_ARRAY_TASK_ID:-} argument
  [[ -n $index ]] || return 0
  for argument in "$@"; do
    if [[ $argument == run.dir=* && $argument != *%a* ]]; then
      fail "$argument: the jobs of an array need directories of their own; put %a into it"
    fi
  done
  overrides=("run.seed=$index" "run.dir=runs/$SLURM_JOB_NAME-$index" "${@//%a/$index}")
}

# --- what then -------------------------------------------------------------------------------------

requeue() {
  echo "$1: requeued"
  # Slurm ends this script, or it ends before: both are right.
  scontrol requeue "$job" || fail "$1: cannot be requeued; submit the same command again"
  exit 0
}

# A preemption that leaves time (GraceTime) sends SIGTERM to the steps and not to this shell. After that
# time Slurm requeues a job, but one that has ended before it takes for failed.
requeue_preempted() {
  if [[ -z $cancelled ]] && grep -q 'PreemptTime=[0-9]' <<<"$(scontrol show job "$job")"; then
    requeue "preempted"
  fi
}

# Counts in the run's directory, for a job's own count of restarts has preemptions in it too.
requeue_failure() {
  local status=$1 tries=$LIPNEXT_FAILURE_REQUEUES file=$2/failures failures=0 whose='' count
  # Another job's are over with it.
  [[ ! -r $file ]] || read -r whose count <"$file" || true
  [[ $whose != "$SLURM_JOB_ID" ]] || failures=$count
  if [[ -z $cancelled ]] && ((failures < tries)); then
    mkdir -p "$2"
    echo "$SLURM_JOB_ID $((failures + 1))" >"$file"
    requeue "failed with exit code $status, $((failures + 1)) of $tries times at most"
  fi
  exit "$status"
}

run_job() {
  [[ -n ${SLURM_JOB_ID:-} ]] || fail "not a Slurm job: use sbatch, or launch/torchrun.sh without Slurm"
  cd "$LIPNEXT_ROOT" || exit 2
  describe_job
  choose_overrides "$@"
  [[ -z ${LIPNEXT_SITE:-} ]] || require_site
  # Signals to the whole job reach this shell too; it has to live until the run has saved.
  local cancelled='' output run_dir status=0
  trap : USR1
  trap 'cancelled=yes' TERM # scancel, or a preemption at once, after which Slurm requeues by itself
  choose_container
  output=$("${on_nodes[@]}" bash launch/shared/node.sh prepare "${overrides[@]}") || status=$?
  # srun ends the other nodes, and so may tell of a signal: the mistake counts.
  ! grep -qx mistake <<<"$output" || exit 2
  if ((status != 0)); then
    requeue_preempted
    exit "$status"
  fi
  ! grep -qx warned <<<"$output" || requeue "USR1 before the first step"
  run_dir=$(sed -n 's/^run\.dir: //p' <<<"$output" | head -n 1)
  export LIPNEXT_RUN_DIR=$run_dir
  # What is older than this the run has not left now. Nothing is removed: other hosts may have seen it.
  [[ ! -d $run_dir ]] || touch "$run_dir/.job-started"
  "${on_nodes[@]}" bash launch/shared/node.sh train "${overrides[@]}" || status=$?
  if ((status != 0)) || has_left stopped; then
    requeue_preempted
  fi
  # By its exit code alone a run that USR1 stopped looks finished, so that torchrun leaves it alone; or
  # failed, where a process that had saved met an error on its way out.
  if [[ -z $cancelled ]] && has_left requeue; then
    local reason
    reason=$(<"$run_dir/requeue") # empty where the disk is full
    requeue "${reason:-stopped by USR1}"
  fi
  ((status == 0)) || requeue_failure "$status" "$run_dir"
  ! has_left stopped || exit 143
  [[ -d $run_dir ]] || fail "$run_dir: not seen outside the container; mount it under the same path"
  rm -f "$run_dir/failures"
}

# A file in the run's directory, since this start.
has_left() {
  [[ $run_dir/$1 -nt $run_dir/.job-started ]]
}

run_job "$@"
