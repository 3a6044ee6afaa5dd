#!/usr/bin/env bash
# build.sh FOLDER [-DNAME=VALUE ...]: cuda/src for the CPU, as FOLDER/libflash_attn.so and FOLDER/dist_flash_attn.
# Needs a C++ compiler.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cuda=$(cd "$here/../../../cuda" && pwd)
mkdir -p "$1"
cd "$1"
shift
defines=("$@")

compile() { # source: a kernel's launch and its shared memory are the two things that a C++ compiler cannot read
    sed -E -e 's/(flash_\w+<D>)<<<(.*)>>>\(step\);/emulated::launch(\2, [step] { \1(step); });/' \
        -e 's/extern __shared__ \S+ (.*) shared\[\];/auto* shared = static_cast<\1*>(emulated::shared_memory());/' \
        "$1" > "$(basename "$1").cpp"
    "${CXX:-g++}" -std=c++17 -O1 -fPIC -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-clobbered \
        "${defines[@]}" -I "$here" -I "$cuda/include" -I "$cuda/src" -c "$(basename "$1").cpp" -o "$(basename "$1").o"
}

jobs=()
for source in "$here/emulator.cpp" "$cuda"/src/*.cpp "$cuda"/src/*.cu; do
    compile "$source" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
"${CXX:-g++}" -pthread ./*.o -o dist_flash_attn
rm main.cpp.o options.cpp.o
"${CXX:-g++}" -pthread -shared ./*.o -o libflash_attn.so
