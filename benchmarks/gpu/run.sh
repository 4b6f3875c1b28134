#!/bin/sh
# Checks and measures the CUDA path on one GPU, without a network, in at most 8 minutes.
#
#   benchmarks/gpu/run.sh [PART...]      parts: check attention gemm model prefix identity
#
# Each part is a process of its own with a limit, so that one fault does not take the others.
# Writes bench-results/gpu/PART.json (or to $OUT) and prints a table. PYTHON chooses the python.
set -u
cd "$(dirname "$0")/../.."
mkdir -p .link && ln -sfn .. .link/palmette
out=${OUT:-bench-results/gpu}
mkdir -p "$out"
export PYTHONPATH="$PWD/.link:$PWD/benchmarks/gpu:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
limit() {
    case $1 in check) echo 120 ;; model) echo 160 ;; *) echo 50 ;; esac
}
failed=0
for part in ${*:-check identity attention gemm model prefix}; do
    echo "== $part"
    timeout "$(limit "$part")" "${PYTHON:-python3}" "benchmarks/gpu/${part}_part.py" \
        --out "$out/$part.json"
    code=$?
    if [ $code -ne 0 ]; then
        echo "== $part: exit $code"
        failed=1
    fi
done
exit $failed
