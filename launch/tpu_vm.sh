#!/usr/bin/env bash
# A run on all hosts of a Cloud TPU VM slice. From the root of the repository:
#
#     export TPU=my-tpu ZONE=us-central2-b PROJECT=my-project
#     launch/tpu_vm.sh setup
#     launch/tpu_vm.sh run --config=configs/large.py --workdir=/mnt/shared/large --config.data.dir=/mnt/shared/data
#     launch/tpu_vm.sh watch
#     launch/tpu_vm.sh stop
#
# The run directory must be one that all hosts see (a mounted bucket or file system). Stopped or
# preempted, the same `run` goes on from the last checkpoint.
set -euo pipefail

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --project="$PROJECT" --worker="$1" --command="$2"
}

: "${TPU:?name of the TPU VM}" "${ZONE:?its zone}" "${PROJECT:?its project}"
[ $# -ge 1 ] || usage
action=$1
shift

case "$action" in
setup)
    archive=$(mktemp --suffix=.tar.gz)
    git archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$TPU":electra_jax.tar.gz --zone="$ZONE" --project="$PROJECT" --worker=all
    rm "$archive"
    on_all_hosts all 'rm -rf electra_jax && mkdir electra_jax && tar -xzf electra_jax.tar.gz -C electra_jax &&
        cd electra_jax && python3 -m venv .venv && .venv/bin/pip install --quiet -r requirements.lock &&
        .venv/bin/pip install --quiet --editable ".[tpu]"'
    ;;
run)
    # Quoted once more, as the command passes through another shell.
    flags=$(printf ' %q' "$@")
    on_all_hosts all "cd electra_jax && PYTHON=.venv/bin/python nohup launch/restart.sh$flags > run.log 2>&1 < /dev/null &"
    ;;
watch)
    on_all_hosts 0 'tail -n 50 -f electra_jax/run.log'
    ;;
stop)
    # The supervisor first, or it would start the run again; then SIGTERM, upon which the run saves.
    on_all_hosts all 'pkill -f launch/restart.sh; pkill -TERM -f electra_jax.main || true'
    ;;
*)
    usage
    ;;
esac
