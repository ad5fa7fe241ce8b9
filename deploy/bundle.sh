#!/usr/bin/env bash
# Makes the self-contained folder: attnd, attnctl and every shared library that is not glibc's, found
# by $ORIGIN; client/ for C and C++ programs, which need libstdc++ too. Called by `./dev bundle` after the build.
#
#     deploy/bundle.sh [--output FOLDER]      default dist/attnd-VERSION-linux-x86_64
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

version=$(sed -n 's/.*kVersion = "\(.*\)";/\1/p' base/version.h)
output=dist/attnd-$version-linux-x86_64
case ${1:-} in
  --output) output=${2:?--output needs a folder} ;;
  '') ;;
  *) echo "bundle.sh: unknown option $1" >&2; exit 2 ;;
esac
programs=(bazel-bin/server/attnd bazel-bin/client/attnctl)
# These belong to the machine that it runs on: glibc and the kernel's own.
glibc='^(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv|linux-vdso)\.so'
limit_mb=80  # unpacked

# A folder that is not an earlier bundle may be anything, a home for example.
if [ -e "$output" ] && [ ! -x "$output/attnd" ] && [ -n "$(ls -A "$output")" ]; then
  echo "bundle.sh: $output is there, and no bundle; name another folder" >&2
  exit 1
fi
rm -rf "$output"
mkdir -p "$output/lib"
for program in "${programs[@]}"; do
  install -m 755 "$program" "$output/"
  strip "$output/${program##*/}"
  patchelf --set-rpath '$ORIGIN/lib' "$output/${program##*/}"
done
libraries=$(ldd "${programs[@]}" | awk '$2 == "=>" { print $1, $3 }' | grep -vE "$glibc" | sort -u)
while read -r name path; do
  [ "$path" != not ] || { echo "bundle.sh: $name is not installed here" >&2; exit 1; }
  install -m 644 "$path" "$output/lib/$name"
  strip --strip-unneeded "$output/lib/$name"
  patchelf --set-rpath '$ORIGIN' "$output/lib/$name"
done <<< "$libraries"
install -m 644 LICENSE README.md SECURITY.md CHANGELOG.md "$output/"
cp -r deploy/{systemd,slurm,kubernetes,helm,compose,quadlet,envoy,haproxy,prometheus,grafana} "$output/"
mkdir -p "$output/docs"
install -m 644 docs/*.md "$output/docs/"
cp -r docs/runbooks "$output/docs/"
install -Dm 644 -t "$output/docs/pictures" docs/pictures/*
install -Dm 644 -t "$output/docs/figures" docs/figures/*
install -Dm 644 -t "$output/examples" examples/*.py examples/*.ipynb examples/attention.c*
deploy/share.sh "$output/share"
client=$(deploy/client.sh "$output/client")
# The terms of the libraries, of those within the programs too (archives, and headers alone), and a list of all.
/usr/bin/python3 -B deploy/bill_of_materials.py "$output" libgrpc-dev libgrpc++-dev libprotobuf-dev libabsl-dev \
  libcli11-dev nlohmann-json3-dev <<< "$(sed 's/^/lib\//' <<< "$libraries"; sed 's/^/client\//' <<< "$client")"

# Nothing but the folder and glibc may be needed; C and C++ programs bring their libstdc++.
folder=$(readlink -f "$output")
for file in "$output"/attnd "$output"/attnctl "$output"/lib/* "$output"/client/lib/libattnd_client.so; do
  env -i LD_LIBRARY_PATH= ldd "$file" | awk '$2 == "=>" { print $1, $3 }' | while read -r name path; do
    case $path in
      "$folder"/lib/* | "$folder"/client/lib/*) ;;
      *) [[ $name =~ $glibc || $file/$name =~ /client/.*/lib(stdc\+\+|gcc_s)\.so ]] ||
        { echo "bundle.sh: ${file##*/} takes $name from $path" >&2; exit 1; } ;;
    esac
  done
done
size_mb=$(du -sm "$output" | cut -f1)
[ "$size_mb" -le $limit_mb ] || { echo "bundle.sh: $size_mb MB, more than $limit_mb" >&2; exit 1; }
echo "$output: $(ls "$output/lib" | wc -l) libraries, $size_mb MB"
