#!/bin/sh
# Prints kernels.lock: print_lock.sh DIGEST ARCHIVE... reads a file with the digest of the device code, and archives
# (kernel_archive.h) of what was compiled from it.
cat <<END
# Registers and spilled bytes of every compiled kernel, and a digest of what they were compiled from: device headers,
# kernels/tiles.*, kernel_source.cc and the compiler. Written by \`./dev lock\`. While the digest holds, \`./dev test\`
# compiles a sample of the kernels (kernel_sample.h) and compares it with these lines.
digest $(cat "$1")
END
shift
for archive; do
  LC_ALL=C awk 'NR == 1 { target = $4; next } $0 == "end" { exit } { print target, $1, $7, $8 }' "$archive"
done | LC_ALL=C sort
