#!/usr/bin/env bash
# On a GPU: builds with CMake, runs the tests, memcheck and racecheck, then measures. A table is the last thing printed;
# its rows are kept in $OUT/cuda.json (default: out/cuda.json). Under 4 minutes; every step has a limit of its own.
#
#   cuda/bench_h200.sh [PYTHON]    an interpreter with torch and pytest (python3)
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
results=${OUT:-out}
build=cuda/build
program=$build/dist_flash_attn
mkdir -p "$results"
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda-13.0/bin
failed=()

step() { # seconds name command...
    local limit=$1 name=$2
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" || { failed+=("$name (exit status $?)"); return 1; }
}

configure_and_build() {
    if ! command -v cmake > /dev/null; then # so that the rest can be measured all the same
        local nvcc="nvcc -std=c++17 -O3 -arch=sm_90 -Xcompiler -fPIC,-pthread -I cuda/include" sources
        sources=$(ls cuda/src/*.cu cuda/src/*.cpp)
        mkdir -p $build
        $nvcc $sources -o $build/dist_flash_attn &
        $nvcc -shared ${sources//cuda\/src\/main.cpp/} -o $build/libflash_attn.so && wait $!
        return
    fi
    cmake -S cuda -B $build -DFLASH_ATTN_STRICT=ON -DPython3_EXECUTABLE="$(command -v "$python")" \
        && cmake --build $build --parallel "$(nproc)"
}
export -f configure_and_build
export build python
command -v cmake > /dev/null || failed+=("cmake is not here: built by nvcc alone, without NCCL")
step 90 build bash -c configure_and_build || { echo "no build, nothing to run"; exit 1; }

FLASH_ATTN_BUILD=$build PYTHONPATH=src step 120 tests "$python" -m pytest -q -m gpu -p no:cacheprovider tests/cuda

if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        for flags in "--dtype fp32 --dim 32 --seq 150" "--dtype fp32 --dim 64 --seq 150 --causal" \
            "--dtype fp32 --dim 128 --seq 100" "--dtype bf16 --dim 32 --seq 150" \
            "--dtype bf16 --dim 64 --seq 150 --causal" "--dtype bf16 --dim 128 --seq 200"; do
            # shellcheck disable=SC2086
            step 30 "$tool $flags" compute-sanitizer --tool $tool --error-exitcode 9 \
                $program $flags --gpus 3 --transport copy --warmup 0 --iters 1
        done
    done
else
    failed+=("compute-sanitizer is not here")
fi

measure() { # name flags: one line of JSON
    # shellcheck disable=SC2086
    timeout --kill-after=5 30 $program $2 --transport copy --json | sed "s/^{/{\"name\": \"$1\", /" >> "$results/cuda.json" \
        || failed+=("$1")
}
echo "== measuring"
: > "$results/cuda.json"
measure "fp32 d64 4k, ring" "--seq 4096 --dim 64 --heads 16 --gpus 4"
measure "bf16 d128 8k, ring" "--seq 8192 --dim 128 --heads 16 --dtype bf16 --gpus 4"
measure "bf16 d128 8k causal, ring" "--seq 8192 --dim 128 --heads 16 --dtype bf16 --gpus 4 --causal"
measure "bf16 d128 8k, queries" "--seq 8192 --dim 128 --heads 16 --dtype bf16 --gpus 4 --strategy queries"
measure "bf16 d64 8k, ring" "--seq 8192 --dim 64 --heads 16 --dtype bf16 --gpus 4"
measure "fp32 d128 4k, ring" "--seq 4096 --dim 128 --heads 16 --gpus 4"
measure "fp32 d32 4k, ring" "--seq 4096 --dim 32 --heads 16 --gpus 4"
measure "fp32 d64 4k causal, ring" "--seq 4096 --dim 64 --heads 16 --gpus 4 --causal"
measure "fp32 d64 1k, 1 head, ring of 2" "--gpus 2 --check"

"$python" - "$results/cuda.json" << 'TABLE' || failed+=("a bar")
import json, sys

BARS = {"fp32 d64 4k, ring": 20.0, "bf16 d128 8k, ring": 250.0}  # TFLOP/s of one GPU
RATIO = 1.15  # of a ring of 4 on that GPU
rows = [json.loads(line) for line in open(sys.argv[1])]
missed = set(BARS) - {row["name"] for row in rows}
print(f"\n{'':32}{'single':>9}{'TFLOP/s':>9}{'bar':>6}{'ranks':>9}{'x single':>9}{'bar':>6}{'difference':>12}")
for row in rows:
    bar, ratio = BARS.get(row["name"]), row["multi_ms"] / row["single_ms"]
    print(f"{row['name']:32}{row['single_ms']:9.3f}{row['single_tflops']:9.1f}{bar or '':>6}{row['multi_ms']:9.3f}"
          f"{ratio:9.3f}{RATIO if bar else '':>6}{row['max_abs_difference']:12.1e}")
    if bar and (row["single_tflops"] < bar or ratio > RATIO):
        missed.add(row["name"])
if missed:
    print("bars missed:", ", ".join(sorted(missed)))
sys.exit(bool(missed))
TABLE
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all passed"
