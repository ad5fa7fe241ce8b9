#!/usr/bin/env bash
# Makes the OCI image from a bundle, without a registry, a container engine or root: glibc and the authorities' certificates
# of this machine's Debian, and the bundle in /opt/attnd, as user 65532. Called by `./dev release`; needs umoci.
#
#     deploy/image.sh BUNDLE FILE.tar       an OCI layout, for `podman load -i` and `docker load -i`
set -euo pipefail
[ $# = 2 ] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
bundle=$(readlink -f "$1") output=$(readlink -m "$2")
cd "$(dirname "$(readlink -f "$0")")/.."
export PATH="$PATH:$PWD/.deps/umoci/usr/bin"
limit_mb=150
version=$(sed -n 's/.*kVersion = "\(.*\)";/\1/p' base/version.h)
epoch=$(git log -1 --format=%ct 2>/dev/null || echo 0)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

umoci init --layout "$work/image"
umoci new --image "$work/image:$version"
umoci unpack --rootless --image "$work/image:$version" "$work/unpacked" 2>/dev/null
root=$work/unpacked/rootfs

# The root file system: what a dynamic program that speaks TLS needs, and nothing to log in with.
mkdir -p "$root"/{dev,etc/ssl/certs,lib/x86_64-linux-gnu,lib64,opt,proc,sys}
mkdir -m 1777 "$root/tmp"
libraries=/lib/x86_64-linux-gnu
for name in libc libm libdl libpthread librt libresolv; do
  install -m 755 "$(ls $libraries/$name.so.*)" "$root/lib/x86_64-linux-gnu/"
done
install -m 755 $libraries/libnss_{files,dns}.so.2 "$root/lib/x86_64-linux-gnu/"
install -m 755 /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
printf 'root:x:0:0:root:/:/sbin/nologin\nattnd:x:65532:65532:attnd:/:/sbin/nologin\n' > "$root/etc/passwd"
printf 'root:x:0:\nattnd:x:65532:\n' > "$root/etc/group"
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] ||
  install -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp -r "$bundle" "$root/opt/attnd"
rm -r "$root"/opt/attnd/{client,share,slurm,kubernetes,helm,compose,quadlet,envoy}  # nobody compiles in here, or reads
/usr/bin/python3 -B deploy/bill_of_materials.py --add "$root/opt/attnd" libc6 ca-certificates
# NVIDIA's container toolkit puts libcuda.so.1 into this folder and runs ldconfig's work by its own program.
echo /lib/x86_64-linux-gnu > "$root/etc/ld.so.conf"
find "$work/unpacked/rootfs" -exec touch -hd "@$epoch" {} +

umoci repack --image "$work/image:$version" --history.created "$created" --history.created_by 'deploy/image.sh' \
  "$work/unpacked"
umoci config --image "$work/image:$version" --no-history --created "$created" \
  --config.user 65532:65532 --config.entrypoint /opt/attnd/attnd --config.exposedports 7070/tcp \
  --config.exposedports 9464/tcp --config.stopsignal SIGTERM --config.env PATH=/opt/attnd:/usr/bin:/bin \
  --config.env NVIDIA_DRIVER_CAPABILITIES=compute,utility --config.label org.opencontainers.image.version="$version" \
  --config.label org.opencontainers.image.licenses=Apache-2.0 --config.label org.opencontainers.image.title=attnd \
  --config.label org.opencontainers.image.revision="$revision" \
  --config.label org.opencontainers.image.created="$created" --os linux --architecture amd64
umoci gc --layout "$work/image"
# The name under which podman, docker and containerd load it; the layout itself knows tags alone.
/usr/bin/python3 - "$work/image/index.json" "docker.io/library/attnd:$version" <<'END'
import json, sys
with open(sys.argv[1]) as file:
    index = json.load(file)
index["manifests"][0]["annotations"]["io.containerd.image.name"] = sys.argv[2]
with open(sys.argv[1], "w") as file:
    json.dump(index, file)
END
size_mb=$(du -sm "$root" | cut -f1)
[ "$size_mb" -le $limit_mb ] || { echo "image.sh: $size_mb MB unpacked, more than $limit_mb" >&2; exit 1; }
tar -C "$work/image" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" -cf "$output" .
echo "$output: $(($(stat -c %s "$output") / 1000000)) MB, $size_mb MB unpacked"
