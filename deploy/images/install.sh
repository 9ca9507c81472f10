#!/bin/sh
# Install the named Debian packages, from /debs if it has any, otherwise from the network.
set -eu
if ls /debs/*.deb >/dev/null 2>&1; then
  # All at once, so dpkg finds the order by itself.
  DEBIAN_FRONTEND=noninteractive dpkg --install --force-unsafe-io /debs/*.deb >/dev/null
else
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
fi
rm -rf /debs /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/* /usr/share/doc/* /usr/share/man/*
