#!/bin/sh
# Runs every test. Installs redis-server first where it is missing: the tests start private servers of their own.
set -eu
cd "$(dirname "$0")/.."

if ! command -v redis-server >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "The tests need redis-server (7.0 or later, or a Valkey under that name) on the PATH: please install it." >&2
        exit 1
    fi
    as_root=
    if [ "$(id -u)" -ne 0 ]; then
        as_root=sudo
    fi
    echo "redis-server is missing. Installing the package redis-server with apt-get${as_root:+ through sudo}."
    $as_root apt-get update
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends redis-server
    echo "Installed: $(redis-server --version)"
fi

echo "+ cargo test --locked $*"
exec cargo test --locked "$@"
