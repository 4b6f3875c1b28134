#!/bin/sh
# Checks and measures the CUDA path on one GPU, without a network, in at most 8 minutes.
#
#   benchmarks/gpu/run.sh [--dry] [PART...]
#
#   compile       the kernels of the parts below, side by side, into Triton's cache;
#                 compile:WEIGHTS/KV for those of model:WEIGHTS/KV
#   check         every kernel and a small model against the reference
#   identity      the same bits alone, batched, chunked, forked, in graphs
#   attention     decode and extend beside a copy, a GEMM, SDPA and FlashInfer; forks
#   model         tokens/s of real shapes with random weights, as ratios to the floor;
#                 model:WEIGHTS/KV in other formats: bf16, int8, int4, fp8 / bf16, int8, fp8
#   prefix        whole steps over shared prefixes, shared pages read once and not
#   host          the host's time per step, with graphs and without
#   sampling      tokens from logits by our sampler, with FlashInfer's filters, by its sampler
#   price         what the deterministic mode costs
#   transformers  the same shapes there: static cache, compiled
#   quantised     int8, int4 and e4m3 weights, K and V against float64, and beside the library
#
# Without names all parts run but `quantised`, which takes a run of its own.
# Each part is a process of its own with a limit, so that one fault does not take the others.
# Writes bench-results/gpu/PART.json (or to $OUT), then a short table. PYTHON chooses the python.
# --dry: tiny sizes on the CPU, to see that every part runs to its end.
set -u
cd "$(dirname "$0")/../.."
mkdir -p .link && ln -sfn .. .link/palmette
export PYTHONPATH="$PWD/.link:$PWD/benchmarks/gpu:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
dry=
if [ "${1:-}" = --dry ]; then
    shift
    dry=--dry
    export TRITON_INTERPRET=1
else
    unset TRITON_INTERPRET
fi
out=${OUT:-bench-results/gpu}
mkdir -p "$out"
limit() {
    case ${1%%:*} in
    check | transformers) echo 90 ;;
    model) echo 110 ;;
    compile) echo 70 ;;
    *) echo 50 ;;
    esac
}
end=$(($(date +%s) + 475))
if [ -n "$dry" ]; then # a busy machine may take its time
    limit() { echo 600; }
    end=$((end + 3600))
fi
failed=0
for part in ${*:-compile check identity attention model prefix host sampling price transformers}; do
    left=$((end - $(date +%s)))
    most=$(limit "$part")
    [ "$most" -le "$left" ] || most=$left
    if [ "$most" -lt 5 ]; then
        echo "== $part: no time left"
        failed=1
        continue
    fi
    echo "== $part"
    name=${part%%:*}
    file=$out/$(echo "$part" | tr ':/' '--').json
    rm -f "$file"
    format=
    [ "$name" = "$part" ] || format="--format ${part#*:}"
    # shellcheck disable=SC2086 # options are words
    timeout "$most" "$python" "benchmarks/gpu/${name}_part.py" --out "$file" $format $dry
    code=$?
    if [ $code -ne 0 ]; then
        echo "== $part: exit $code"
        failed=1
    fi
done
"$python" benchmarks/gpu/table.py "$out" || failed=1
exit $failed
