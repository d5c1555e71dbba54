#!/usr/bin/env bash
# Runs electra_jax.main with the flags given, again and again while it ends with exit code 42: it was
# interrupted and has saved. Any other exit code is passed on.
set -u
while true; do
    "${PYTHON:-python3}" -m electra_jax.main "$@"
    code=$?
    [ "$code" -eq 42 ] || exit "$code"
    echo "interrupted; starting again" >&2
    sleep 5
done
