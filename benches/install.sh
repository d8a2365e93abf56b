#!/bin/sh
# Installs what `make bench` compares Tidegate with, from Debian's own packages, where it is missing.
set -eu

missing=""
for package in nginx libnginx-mod-http-lua haproxy redis-server wrk nghttp2-client; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

sudo=""
[ "$(id -u)" -eq 0 ] || sudo="sudo"
echo "installing$missing"
$sudo apt-get update -q
# shellcheck disable=SC2086 # one word per package
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
