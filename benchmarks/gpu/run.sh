#!/bin/sh
# Checks and measures the CUDA path on one GPU, without a network, in at most 8 minutes.
#
#   benchmarks/gpu/run.sh [--dry] [PART...]
#   benchmarks/gpu/run.sh --help
#
# Without names these run, most important first, each in its seconds:
#
#   compile       45  the kernels of the parts below, side by side, into Triton's cache;
#                     compile:WEIGHTS/KV for those of model:WEIGHTS/KV
#   check         65  every kernel and a small model against the reference
#   identity      25  the same bits alone, batched, chunked, forked, in graphs
#   engine        65  the whole engine: the same answers a step ahead, swapped, from the cache, with
#                     quantised weights and KV; how long the device stands still between steps
#   attention     40  decode and extend beside a copy, a GEMM, SDPA and FlashInfer; forks
#   model         85  tokens/s of real shapes with random weights, as ratios to the floor;
#                     model:WEIGHTS/KV in other formats: bf16, int8, int4, fp8 / bf16, int8, fp8
#   host          20  the host's time per step, with graphs and without
#   prefix        35  whole steps over shared prefixes, shared pages read once and not
#   sampling      15  tokens from logits by our sampler, with FlashInfer's filters, by its sampler
#   price         25  what the deterministic mode costs
#   transformers  55  the same shapes there: static cache, compiled; takes what the others left
#
# Left out, each for a run of its own: quantised (int8, int4 and e4m3 weights, K and V against
# float64, and beside the library) and the formats of compile and model, as in
#
#   benchmarks/gpu/run.sh compile:int4/fp8 model:int4/fp8 quantised
#
# A run of chosen parts gives each of them what it may take alone. Each part is a process of its own,
# so that one fault does not take the others. Needs torch and triton; engine msgspec as well, and
# llguidance for JSON schemas; what needs a package that is missing is skipped and named.
# Writes bench-results/gpu/PART.json (or to $OUT), then a table that ends with each bar: met, missed
# or not run. PYTHON chooses the python. --dry: tiny sizes on the CPU, to see that every part runs
# to its end.
set -u
cd "$(dirname "$0")/../.."
if [ "${1:-}" = --help ]; then
    sed -n '2,/^set -u/s/^# \{0,1\}//p' benchmarks/gpu/run.sh
    exit 0
fi
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
if [ -z "$dry" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device that $python sees; --dry runs every part at tiny sizes on the CPU" >&2
    exit 1
fi
out=${OUT:-bench-results/gpu}
mkdir -p "$out"
total=475
parts="compile check identity engine attention model host prefix sampling price transformers"
limit() { # as above; its figures are read from there
    sed -n "s/^#   ${1%%:*}  *\([0-9][0-9]*\)  .*/\1/p" benchmarks/gpu/run.sh
}
if [ $# -gt 0 ]; then
    parts="$*"
    limit() { echo 240; }
fi
end=$(($(date +%s) + total))
if [ -n "$dry" ]; then # a busy machine may take its time
    limit() { echo 600; }
    end=$((end + 3600))
fi
failed=0
for part in $parts; do
    left=$((end - $(date +%s)))
    most=$(limit "$part")
    [ "$part" != transformers ] || [ -n "$dry" ] || most=$left
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
    timeout "$most" "$python" "benchmarks/gpu/${name}_part.py" --out "$file" --seconds "$most" \
        $format $dry
    code=$?
    if [ $code -ne 0 ]; then
        echo "== $part: exit $code"
        failed=1
    fi
done
"$python" benchmarks/gpu/table.py "$out" || failed=1
exit $failed
