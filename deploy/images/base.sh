#!/usr/bin/env bash
# Make the base image from Debian packages, for machines that reach no registry.
#   base.sh [IMAGE]            default kvmesh-base:bookworm
#   MIRROR=http://deb.debian.org/debian   any Debian mirror, also a private one
# Needs root, debootstrap and docker. The image holds Debian's minimal system, Python 3.11, tini and CA certificates.
# Packages for the build and for the images of Redis and of the faults are left in debs/, so these build without a network too.
set -euo pipefail
cd "$(dirname "$0")"
debs=$PWD/debs

image=${1:-kvmesh-base:bookworm}
mirror=${MIRROR:-http://deb.debian.org/debian}
suite=bookworm
packages=python3.11,python3.11-minimal,libpython3.11,tini,ca-certificates

need() { command -v "$1" >/dev/null || { echo "base.sh: $1 is missing; on Debian: apt-get install $2" >&2; exit 1; }; }
need docker docker.io
need debootstrap debootstrap
[ "$(id -u)" = 0 ] || { echo "base.sh: debootstrap needs root; run base.sh as root, or give the build another BASE" >&2; exit 1; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"

echo "base.sh: fetching Debian $suite from $mirror" >&2
debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" |
  awk '/^I: (Retrieving|Validating) /{ got += /Validating/; if (got % 25 == 0 && /Validating/) print "base.sh: " got " packages" > "/dev/stderr" }
       /^[EW]:/ { print > "/dev/stderr" }
       /Unpacking the base system|Configuring the base system|Base system installed/ { sub(/^I: /, "base.sh: "); print > "/dev/stderr" }'

for extra in build redis faults; do
  echo "base.sh: fetching the packages of $extra" >&2
  rm -rf "${debs:?}/$extra"
  mkdir -p "$debs/$extra" "$root/tmp/debs/partial"
  chroot "$root" apt-get -qq update >/dev/null
  # shellcheck disable=SC2046
  chroot "$root" apt-get -qq install --download-only --no-install-recommends -o Dir::Cache::archives=/tmp/debs \
    $(cat "$extra.packages") >/dev/null
  mv "$root"/tmp/debs/*.deb "$debs/$extra/"
done

echo "base.sh: removing files that no container needs" >&2
# Provide Python under the name that venv and tritonserver look for.
ln -sf python3.11 "$root/usr/bin/python3"
cd "$root"
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/log/* var/cache/ldconfig/aux-cache \
  usr/share/doc/* usr/share/man/* usr/share/info/* usr/share/locale/* usr/share/lintian usr/share/bug tmp/* \
  usr/lib/x86_64-linux-gnu/gconv debootstrap var/lib/dpkg/*-old etc/machine-id var/lib/dbus/machine-id etc/hostname etc/resolv.conf
# Compiled modules contain their build time. The images compile the modules they use themselves.
find usr/lib/python3* -name __pycache__ -type d -prune -exec rm -rf {} +
rm -rf usr/lib/python3.11/{test,idlelib,tkinter,turtledemo,lib2to3,ensurepip,distutils/tests,pydoc_data}
: > etc/machine-id

echo "base.sh: importing $image" >&2
# Sorted, and every file no newer than the release. The same packages therefore make the same layer.
tar --create --sort=name --numeric-owner --xattrs --mtime='2026-01-01 00:00Z' --clamp-mtime . |
  docker import --change 'CMD ["/bin/sh"]' --change 'ENV LANG=C.UTF-8' \
    --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --message "Debian $suite with Python 3.11 and tini" - "$image" >/dev/null
docker image inspect --format '{{.Size}}' "$image" | awk -v image="$image" '{ printf "base.sh: %s, %.0f MB\n", image, $1 / 1e6 }' >&2
