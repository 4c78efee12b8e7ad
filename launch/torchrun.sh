#!/usr/bin/env bash
# Train without Slurm, on the GPUs of this machine:
#
#   launch/torchrun.sh configs/imagenet_1b.yaml [section.key=value …]
#
# or of several, with the same command on each and a number of its own:
#
#   LIPNEXT_NODES=2 LIPNEXT_NODE=0 LIPNEXT_HEAD_ADDRESS=10.0.0.1 launch/torchrun.sh configs/imagenet_2b.yaml
#   LIPNEXT_NODES=2 LIPNEXT_NODE=1 LIPNEXT_HEAD_ADDRESS=10.0.0.1 launch/torchrun.sh configs/imagenet_2b.yaml
#
# LIPNEXT_PROCS_PER_NODE: if not as many as there are GPUs. docs/cluster.md has the rest.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 2
}

LIPNEXT_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/shared/environment.sh
source "$LIPNEXT_ROOT/launch/shared/environment.sh"
[[ $# -gt 0 && $1 != *=* && $1 != -* ]] || fail "usage: launch/torchrun.sh CONFIG.yaml [section.key=value …]"
LIPNEXT_CONFIG=$1
shift
# The rest happens in the repository, as with Slurm.
[[ ! -e $LIPNEXT_CONFIG ]] || LIPNEXT_CONFIG=$(realpath "$LIPNEXT_CONFIG")

gpus=$(count_gpus)
: "${LIPNEXT_NODES:=1}" "${LIPNEXT_NODE:=0}" "${LIPNEXT_PROCS_PER_NODE:=$((gpus > 0 ? gpus : 1))}"
# A person watches, and sees a failure at once; unattended, 1 or more is better.
: "${LIPNEXT_MAX_RESTARTS:=0}"
require_numbers LIPNEXT_NODES LIPNEXT_NODE LIPNEXT_PROCS_PER_NODE LIPNEXT_MAX_RESTARTS
((LIPNEXT_NODE < LIPNEXT_NODES)) || fail "LIPNEXT_NODE = $LIPNEXT_NODE: must be below LIPNEXT_NODES = $LIPNEXT_NODES"
if ((LIPNEXT_NODES > 1)); then
  [[ -n ${LIPNEXT_HEAD_ADDRESS:-} ]] || fail "LIPNEXT_NODES = $LIPNEXT_NODES: needs LIPNEXT_HEAD_ADDRESS, that of node 0"
  # All nodes need the same id, and 'none' is no job's: a run's lock believes no other host by it.
  : "${LIPNEXT_HEAD_PORT:=29400}" "${LIPNEXT_RUN_ID:=none}"
  # The route to the head shows our own address on that network.
  : "${LIPNEXT_ADDRESS:=$(ip route get "$LIPNEXT_HEAD_ADDRESS" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p')}"
  : "${LIPNEXT_ADDRESS:=$(hostname -f)}"
else
  # Port 0 is a free one. The id must be this job's alone, for a run's lock knows its owner by it:
  # in containers process ids are the same everywhere.
  : "${LIPNEXT_HEAD_ADDRESS:=127.0.0.1}" "${LIPNEXT_HEAD_PORT:=0}"
  : "${LIPNEXT_RUN_ID:=$(uname -n)-$$-$RANDOM$RANDOM}"
fi
LIPNEXT_ADDRESSES=$LIPNEXT_HEAD_ADDRESS
for ((i = 1; i < LIPNEXT_NODES; i++)); do
  LIPNEXT_ADDRESSES+=" $LIPNEXT_ADDRESS" # a node looks at the head's and at its own only
done
export LIPNEXT_ROOT LIPNEXT_CONFIG LIPNEXT_NODES LIPNEXT_NODE LIPNEXT_PROCS_PER_NODE LIPNEXT_RUN_ID
export LIPNEXT_HEAD_PORT LIPNEXT_ADDRESSES LIPNEXT_MAX_RESTARTS

"$LIPNEXT_ROOT/launch/shared/node.sh" prepare "$@" >/dev/null
exec "$LIPNEXT_ROOT/launch/shared/node.sh" train "$@"
