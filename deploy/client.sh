#!/usr/bin/env bash
# Makes the folder for C and C++ programs from bazel-bin: the library with what it needs under names of its own, its header,
# and what pkg-config and CMake read. Called by bundle.sh; needs patchelf. Prints "lib/NAME PATH" of each library, PATH being
# the installed file that it is a copy of.
#
#     deploy/client.sh FOLDER
set -euo pipefail
[ $# = 1 ] || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
output=$(readlink -f "$1")
cd "$(dirname "$(readlink -f "$0")")/.."
library=bazel-bin/client/c/libattnd_client.so
version=$(sed -n 's/.*kVersion = "\(.*\)";/\1/p' base/version.h)

/usr/bin/python3 -B client/python/build_native.py "$library" "$output/lib" >&2
ln -s libattnd_client-attnd0.so "$output/lib/libattnd_client.so"
install -Dm 644 -t "$output/include" client/c/attnd_client.h
install -m 644 examples/attention.c "$output/example.c"
mkdir -p "$output"/lib/{pkgconfig,cmake/attnd}
sed "s/@version@/$version/" deploy/client/attnd.pc.in > "$output/lib/pkgconfig/attnd.pc"
install -m 644 deploy/client/attndConfig.cmake "$output/lib/cmake/attnd/"
sed "s/@version@/$version/" deploy/client/attndConfigVersion.cmake.in > "$output/lib/cmake/attnd/attndConfigVersion.cmake"

ldd "$library" | awk '$2 == "=>" { print $1, $3 }' | while read -r name path; do
  copy=lib/${name%%.so*}-attnd0.so${name#*.so}
  [ ! -e "$output/$copy" ] || echo "$copy $path"
done
