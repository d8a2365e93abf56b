#!/bin/sh
# Runs every test. Installs what is missing first: redis-server, since the tests start private servers of their own; curl, the
# clients of nghttp2, libnss-wrapper, since names change in them, and Python with the SDKs of LLM providers (into target/sdk-venv), since the tests try clients as they are;
# chromium, and Node with playwright-core (into target/page), since they look at the page as operators do; HAProxy, nginx and
# promtool (into target), which read what the documentation and deploy/ have for them.
set -eu
cd "$(dirname "$0")/.."

as_root=
if [ "$(id -u)" -ne 0 ]; then
    as_root=sudo
fi

needs_apt() {
    if ! command -v apt-get >/dev/null; then
        echo "The tests need $1 on the PATH ($2): please install it." >&2
        exit 1
    fi
}

install() {
    needs_apt "$1" "$2"
    echo "$1 is missing. Installing the package $1 with apt-get${as_root:+ through sudo}."
    $as_root apt-get update
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$1"
}

if ! command -v redis-server >/dev/null; then
    install redis-server "7.0 or later, or a Valkey under that name"
    echo "Installed: $(redis-server --version)"
fi

if ! command -v curl >/dev/null; then
    install curl "any"
fi

if ! command -v h2load >/dev/null || ! command -v nghttp >/dev/null; then
    install nghttp2-client "any"
fi

# Names that change, for one process alone: preloaded by those tests.
if ! ls /usr/lib/*/libnss_wrapper.so >/dev/null 2>&1 && ! ls /usr/lib*/libnss_wrapper.so >/dev/null 2>&1; then
    install libnss-wrapper "any"
fi

for balancer in haproxy nginx; do
    if ! command -v "$balancer" >/dev/null && ! [ -x "/usr/sbin/$balancer" ]; then
        install "$balancer" "any"
    fi
done
PATH=$PATH:/usr/sbin

# Without root the package is installed into a root of its own as if by it.
if [ "$(id -u)" -ne 0 ] && command -v dpkg >/dev/null && ! command -v fakeroot >/dev/null; then
    install fakeroot "any"
fi

# The one program out of Debian's package, which would start a server.
if ! command -v promtool >/dev/null && ! [ -x target/promtool ]; then
    needs_apt promtool "any"
    echo "Taking promtool out of the package prometheus, into target."
    folder=$(mktemp -d)
    chmod 755 "$folder"
    (cd "$folder" && apt-get download -q prometheus || { $as_root apt-get update && apt-get download -q prometheus; })
    mkdir -p target
    dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -x -O ./usr/bin/promtool > target/promtool
    chmod +x target/promtool
    rm -r "$folder"
fi

venv=target/sdk-venv
if ! cmp -s tests/sdk/requirements.txt "$venv/requirements.txt"; then
    if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
        install python3-venv "Python 3.10 or later, with venv"
    fi
    echo "Installing into $venv with pip:" $(cat tests/sdk/requirements.txt)
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/sdk/requirements.txt
    cp tests/sdk/requirements.txt "$venv/requirements.txt"
fi

if ! command -v chromium >/dev/null; then
    install chromium "any"
fi
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    install npm "with Node 20 or later"
fi
if [ ! -d target/page/node_modules/playwright-core ] ||
    ! cmp -s tests/page/package-lock.json target/page/package-lock.json; then
    echo "Installing playwright-core into target/page with npm."
    mkdir -p target/page
    rm -rf target/page/node_modules
    cp tests/page/package.json tests/page/package-lock.json target/page/
    npm ci --prefix target/page --no-audit --no-fund --ignore-scripts
fi

# Most of them wait most of the time: two for each processor.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((2 * $(nproc)))}"

echo "+ cargo test --locked $*"
exec cargo test --locked "$@"
