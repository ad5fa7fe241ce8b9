#!/usr/bin/env bash
# Makes what is handed out, from bazel-bin: FOLDER/NAME.tar.gz (the bundle), NAME.oci.tar (the image), the wheels, the
# sdist, the Helm chart, NAME.cdx.json (the bundle's SBOM) and SHA256SUMS of these. The same build and commit give the same
# bytes. Called by `./dev release`.
#
#     deploy/release.sh FOLDER NAME
set -euo pipefail
[ $# = 2 ] || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
output=$(readlink -f "$1") name=$2
cd "$(dirname "$(readlink -f "$0")")/.."
rm -f "$output"/attnd{,_server}-*.whl  # of another version or policy
step() { echo "release.sh: step $1 of 4, $2" >&2; }

step 1 bundle
deploy/bundle.sh --output "$output/$name"
step 2 tarball
epoch=$(git log -1 --format=%ct 2>/dev/null || echo 0)
tar -C "$output" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -cf - "$name" |
  gzip -n > "$output/$name.tar.gz"
# As `helm package` would; its links to alerts and boards become files.
chart=attnd-$(sed -n 's/.*kVersion = "\(.*\)";/\1/p' base/version.h).tgz
tar -C deploy/helm --dereference --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -cf - attnd |
  gzip -n > "$output/$chart"
cp "$output/$name/sbom.cdx.json" "$output/$name.cdx.json"
step 3 image
deploy/image.sh "$output/$name" "$output/$name.oci.tar"
step 4 wheels
deploy/wheels.sh "$output"
cd "$output"
sha256sum "$name.tar.gz" "$chart" "$name.oci.tar" "$name.cdx.json" attnd{,_server}-*.whl "${chart%.tgz}.tar.gz" > SHA256SUMS
cat SHA256SUMS
