#!/usr/bin/env bash
# Runs electra_jax.main with the flags given, again and again while it ends because it was interrupted:
# with exit code 42, or 143 if SIGTERM came before the first step was done. Any other exit code is passed
# on. Told to stop itself, by SIGTERM or Ctrl-C, it has the run save and ends with it.
set -u
told=""
child=""

pass_on() {
    told=yes
    kill -TERM "$child" 2>/dev/null
}
trap pass_on INT TERM

while true; do
    "${PYTHON:-python3}" -m electra_jax.main "$@" &
    child=$!
    [ -z "$told" ] || kill -TERM "$child" # The signal came before the run had a number.
    while true; do # A signal ends `wait`, not the run.
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    [ -z "$told" ] || exit "$code"
    [ "$code" -eq 42 ] || [ "$code" -eq 143 ] || exit "$code"
    echo "interrupted; starting again" >&2
    sleep 5
done
