#!/bin/sh
# Packs a program that was built as a Debian package: deploy/deb/build.sh [target/release/tidegate [target/debian]].
# Prints the name of the package. Needs dpkg-deb, gzip and strip. LEVEL is that of gzip, 9 unless told.
set -eu
cd "$(dirname "$0")/../.."
program=${1:-target/release/tidegate}
out=${2:-target/debian}
version=$("$program" --version | cut -d' ' -f2)
architecture=$(dpkg --print-architecture)

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
share=$root/usr/share
# Without the symbols that only a debugger reads.
install -D -s -m 755 "$program" "$root/usr/bin/tidegate"
install -D -m 644 deploy/deb/proxy.toml "$root/etc/tidegate/proxy.toml"
install -D -m 600 deploy/deb/default "$root/etc/default/tidegate"
install -D -m 644 -t "$root/lib/systemd/system" deploy/systemd/tidegate.service deploy/systemd/tidegate.socket
install -D -m 644 -t "$share/doc/tidegate/examples" proxy.toml deploy/prometheus/alerts.yml deploy/grafana/tidegate.json
install -D -m 644 LICENSE "$share/doc/tidegate/copyright"
gzip -9n < CHANGELOG.md > "$share/doc/tidegate/changelog.gz"
mkdir -p "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/vendor-completions" \
    "$share/fish/vendor_completions.d"
"$program" man | gzip -9n > "$share/man/man1/tidegate.1.gz"
"$program" completions bash > "$share/bash-completion/completions/tidegate"
"$program" completions zsh > "$share/zsh/vendor-completions/_tidegate"
"$program" completions fish > "$share/fish/vendor_completions.d/tidegate.fish"
find "$share" -type f -exec chmod 644 {} +

install -D -m 755 -t "$root/DEBIAN" deploy/deb/postinst deploy/deb/prerm
printf '/etc/tidegate/proxy.toml\n/etc/default/tidegate\n' > "$root/DEBIAN/conffiles"
cat > "$root/DEBIAN/control" <<CONTROL
Package: tidegate
Version: $version
Architecture: $architecture
Maintainer: Tidegate maintainers <maintainers@tidegate.example>
Section: net
Priority: optional
Depends: libc6 (>= 2.34), libgcc-s1
Recommends: ca-certificates
Suggests: redis-server (>= 5:7.0)
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Homepage: https://github.com/tidegate/tidegate
Description: reverse proxy that holds a fleet-wide limit on requests in flight
 A request takes a slot before it leaves for the upstream and gives it back
 after the answer's last byte; when every slot is taken it waits in a bounded
 queue, or is refused with Retry-After. Instances that share a Redis share the
 slots.
CONTROL

mkdir -p "$out"
package=$out/tidegate_${version}_$architecture.deb
dpkg-deb -Zgzip "-z${LEVEL:-9}" --root-owner-group --build "$root" "$package" >&2
echo "$package"
