# shellcheck shell=bash
# What every launcher sets before training. Whatever is set already stays: `NCCL_DEBUG=INFO sbatch …`.
# Mistakes go to `fail`, which the script that sources this defines.

# Variables that bash computes with: a word it would take for the name of another one.
require_numbers() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name = ${!name}: must be a whole number"
  done
}

# --- Python ------------------------------------------------------------------------------------
# LIPNEXT_PYTHON, or that of LIPNEXT_VENV, or of the repository's .venv, or python3 of the container
# or the machine.
choose_python() {
  local venv=${LIPNEXT_VENV:-}
  if [[ -z $venv && -z ${LIPNEXT_IN_CONTAINER:-} && -x .venv/bin/python ]]; then
    venv=$PWD/.venv
  fi
  : "${LIPNEXT_PYTHON:=${venv:+$venv/bin/}python3}"
  command -v "$LIPNEXT_PYTHON" >/dev/null ||
    fail "LIPNEXT_PYTHON = $LIPNEXT_PYTHON: no such program on $(uname -n); set it, or LIPNEXT_VENV"
}

# --- GPUs --------------------------------------------------------------------------------------
# Those that CUDA will see. nvidia-smi lists all of the machine; its errors go to the same place.
count_gpus() {
  local gpus=0 listed visible
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    listed=,$CUDA_VISIBLE_DEVICES
    listed=${listed%%,-1*} # where CUDA stops
    IFS=, read -ra visible <<<"${listed#,}"
    gpus=${#visible[@]}
  elif command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus | grep -c '^GPU ') || true
  fi
  echo "$gpus"
}

# Whether torchrun can bind each rank to the cores near its GPU: it fails without numactl, and where a
# rank has no GPU or may use no core near it. So this task must have cores of every NUMA node.
can_bind() {
  local cores number allowed
  (($(count_gpus) >= LIPNEXT_PROCS_PER_NODE)) && command -v numactl >/dev/null || return 1
  allowed=" $(numactl --show | sed -n 's/^nodebind: *//p') "
  [[ $allowed =~ [0-9] ]] || return 1
  for cores in /sys/devices/system/node/node[0-9]*/cpulist; do
    number=${cores%/cpulist}
    [[ -z $(<"$cores") || $allowed == *" ${number##*/node} "* ]] || return 1
  done
}

# A path of the repository if it is not a whole one; bash would look for a bare name in PATH.
require_site() {
  [[ $LIPNEXT_SITE == /* ]] || LIPNEXT_SITE=$LIPNEXT_ROOT/$LIPNEXT_SITE
  [[ -f $LIPNEXT_SITE && -r $LIPNEXT_SITE ]] ||
    fail "LIPNEXT_SITE = $LIPNEXT_SITE: no such file on $(uname -n), or not readable"
}

# --- NCCL and torch ----------------------------------------------------------------------------
# What a cluster needs beyond this (NCCL_IB_HCA, NCCL_NET_PLUGIN, …) goes into the environment of
# sbatch, or into a file that LIPNEXT_SITE names and that is read first.
set_environment() {
  if [[ -n ${LIPNEXT_SITE:-} ]]; then
    require_site
    # shellcheck source=/dev/null
    source "$LIPNEXT_SITE"
  fi
  # Warnings say why a transport failed; more would be a line per ring and rank.
  : "${NCCL_DEBUG:=WARN}"
  # 4 µs · 2²² = 17 s for each acknowledgement over InfiniBand; with NCCL_IB_RETRY_CNT = 7 an error
  # comes after about two minutes. Links of large fabrics flap for seconds, and a run of days should
  # not end with them.
  : "${NCCL_IB_TIMEOUT:=22}"
  # The interface for NCCL's first contact, and for gloo, which checkpoints go over. By itself gloo
  # takes what the host's name resolves to, which may be loopback. LIPNEXT_INTERFACE sets both.
  if [[ -n ${LIPNEXT_INTERFACE:-} ]]; then
    : "${NCCL_SOCKET_IFNAME:=$LIPNEXT_INTERFACE}" "${GLOO_SOCKET_IFNAME:=$LIPNEXT_INTERFACE}"
    export NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
  fi
  # The last collectives of every rank are written when one times out: they tell who was missing.
  : "${TORCH_NCCL_DUMP_ON_TIMEOUT:=1}"
  # Weights that are gathered and freed, matrix by matrix, would leave holes in the GPU's memory.
  : "${PYTORCH_CUDA_ALLOC_CONF:=expandable_segments:True}"
  # Processes that make batches and ranks share a node's cores; more threads each get in the way. A
  # step on the host (parallel.offload_optimizer) takes more by itself, if you have not chosen.
  [[ -z ${OMP_NUM_THREADS:-} ]] || export LIPNEXT_OMP_CHOSEN=yes
  : "${OMP_NUM_THREADS:=1}"
  # Idle threads sleep: they do not spin on cores that others use.
  : "${OMP_WAIT_POLICY:=passive}"
  # After SIGTERM, the time that ranks have to save before torchrun kills them.
  : "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:=300}"
  # What is printed is in the log at once, not when a buffer is full.
  : "${PYTHONUNBUFFERED:=1}"
  export NCCL_DEBUG NCCL_IB_TIMEOUT TORCH_NCCL_DUMP_ON_TIMEOUT PYTORCH_CUDA_ALLOC_CONF OMP_NUM_THREADS
  export OMP_WAIT_POLICY TORCH_ELASTIC_SHUTDOWN_TIMEOUT PYTHONUNBUFFERED
}
